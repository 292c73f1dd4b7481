"""Makes plans in the background: has what is not known measured, chooses the size of a microbatch with the first one, and asks
the planner. What comes of it is posted to the state machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from atoll.coordinator.data.feed import Feed
from atoll.coordinator.events import Event
from atoll.coordinator.first_values import held_specs
from atoll.coordinator.moves import Holders
from atoll.coordinator.offload import Offload
from atoll.coordinator.planning.network import Network
from atoll.coordinator.planning.plan import Plan
from atoll.coordinator.planning.segments import PeerOffer
from atoll.coordinator.run.events import LinksShown, MoveJudged, PlanMade, PlanningProgressed, PlanRefused, RunEvent
from atoll.coordinator.run.instructions import ConsiderMove, MakePlan, SurveyPeers
from atoll.coordinator.sizing import Sized, Sizing, preferred
from atoll.coordinator.survey.survey import Surveyed, Surveyor
from atoll.coordinator.traced_model import Around, Proposal, TracedModel, summed_up
from atoll.protocol.errors import PlacementError
from atoll.protocol.ids import Generation, PeerId
from atoll.protocol.job import Job

_log = logging.getLogger(__name__)


class Proposing:
    """``sizing`` is the traced model; ``begin`` hears of the model at the size of microbatch that the first plan chooses, and
    ``keep_job`` of the job that says so; ``post`` takes results, ``tell`` is the outside."""

    def __init__(
        self,
        *,
        keep_job: Callable[[Job], None],
        surveyor: Surveyor,
        offload: Offload,
        begin: Callable[[TracedModel, Feed], None],
        post: Callable[[RunEvent], None],
        tell: Callable[[Event], Awaitable[None]],
    ) -> None:
        self._keep_job = keep_job
        self._surveyor = surveyor
        self._offload = offload
        self._begin = begin
        self._post = post
        self._tell = tell
        self._deciding = asyncio.Lock()
        self._model: TracedModel | None = None
        self._proposals: dict[Plan, tuple[Proposal, Surveyed]] = {}
        self._taken: tuple[Proposal, Surveyed] | None = None
        self.sizing: Sizing | None = None

    def take(self, plan: Plan) -> tuple[Proposal, Surveyed]:
        """What a plan that is put to use was proposed with; all others are forgotten. One that goes on with fewer replicas has
        the stages of the plan before it."""
        before = self._taken
        if plan in self._proposals:
            self._taken = self._proposals[plan]
        else:
            assert before is not None, "a plan that nobody made"
            assert plan.cuts == before[0].plan.cuts, "a plan of other stages, that nobody made"
            self._taken = summed_up(plan, before[0].graphs), before[1]
        self._proposals.clear()
        return self._taken

    async def make_plan(self, instruction: MakePlan) -> None:
        """A plan for the peers that are here, or why there is none."""
        try:
            model = await self._decide(instruction)
            found = await self._at_once(model, instruction) if instruction.at_once else None
            if found is not None:
                self._post(self._made(instruction.generation, *found, hasty=True))
                return
            again = instruction.broken if instruction.probed else frozenset()
            surveyed = await self._survey(instruction.generation, instruction.peers, again)
            if surveyed.shown:
                self._post(LinksShown(pairs=surveyed.shown))
            around = _around(instruction, surveyed.shown)
            proposal = await self._offload.run(model.propose, surveyed.offers, surveyed.network, around)
        except PlacementError as error:
            names = tuple(offer.name for offer in instruction.peers)
            refused = PlanRefused(generation=instruction.generation, peers=names, reason=str(error), hopeless=error.hopeless)
            self._post(refused)
            return
        self._post(self._made(instruction.generation, proposal, surveyed))

    async def _at_once(self, model: TracedModel, instruction: MakePlan) -> tuple[Proposal, Surveyed] | None:
        """With what is known: the plan before, with others in the place of lost peers, or where nobody can take it a plan on
        those that are known well. None where there is neither. A coordinator that was started again knows nothing of speeds
        and links yet, and finds a place for a peer that did not come back by estimates: better plans are looked for later."""
        previous = instruction.previous
        if previous is None or instruction.broken:
            return None
        await self._surveyor.reach_known(instruction.peers)  # else those that just came back are dialled in vain
        with contextlib.suppress(PlacementError):
            same = await self._offload.run(model.as_before, instruction.peers, previous)
            if same is not None:
                return same, await self._surveyor.estimate(instruction.peers)
        surveyed = await self._surveyor.estimate(instruction.peers)
        holders = _merged(instruction.holders, instruction.on_disks)
        proposal: Proposal | None = None
        with contextlib.suppress(PlacementError):
            proposal = await self._offload.run(model.stand_in, surveyed.offers, surveyed.network, previous, holders)
        known = tuple(offer for offer in instruction.peers if self._surveyor.knows(offer.name))
        if proposal is None and 0 < len(known) < len(instruction.peers):
            surveyed = await self._surveyor.estimate(known)
            with contextlib.suppress(PlacementError):
                proposal = await self._offload.run(model.propose, surveyed.offers, surveyed.network)
        return None if proposal is None else (proposal, surveyed)

    async def survey_peers(self, generation: Generation, instruction: SurveyPeers) -> None:
        """Whatever is not known yet of these peers."""
        await self._survey(generation, instruction.peers)

    async def consider_move(self, generation: Generation, instruction: ConsiderMove) -> None:
        """Whether there is a plan that is worth leaving the present one for; asked under ``generation``."""
        assert self._model is not None
        try:
            surveyed = await self._survey(generation, instruction.peers)
            proposal, reason = await self._offload.run(
                self._model.reconsider,
                surveyed.offers,
                instruction.plan,
                instruction.steps_left,
                surveyed.network,
                instruction.broken,
            )
            proposed = self._made(instruction.since, proposal, surveyed) if proposal is not None else None
        except PlacementError as error:
            proposed, reason = None, str(error)
        _log.info("a look at the plan: %s", reason)
        self._post(MoveJudged(since=instruction.since, reason=reason, proposed=proposed, look=instruction.look))

    def _made(self, generation: Generation, proposal: Proposal, surveyed: Surveyed, *, hasty: bool = False) -> PlanMade:
        self._proposals[proposal.plan] = proposal, surveyed
        names = tuple(frozenset(spec.name for spec in held_specs(graph)) for graph in proposal.graphs)
        return PlanMade(generation=generation, plan=proposal.plan, summaries=proposal.summaries, names=names, hasty=hasty)

    async def _links(self, instruction: MakePlan) -> Network:
        """The links between the peers, measured as far as it goes, for they decide what size a microbatch should have."""

        def progress(doing: str) -> None:
            self._post(PlanningProgressed(generation=instruction.generation, doing=doing))

        return await self._surveyor.links(instruction.generation, instruction.peers, progress)

    async def _survey(
        self,
        generation: Generation,
        peers: Sequence[PeerOffer],
        again: frozenset[frozenset[PeerId]] = frozenset(),
        *,
        tell: bool = True,
    ) -> Surveyed:
        """What there is to know of ``peers``, measured as far as it goes; the links of the pairs ``again`` once more."""

        def progress(doing: str) -> None:
            self._post(PlanningProgressed(generation=generation, doing=doing))

        surveyed = await self._surveyor.complete(generation, peers, progress, again)
        progress("")
        for event in surveyed.events if tell else ():
            await self._tell(event)
        return surveyed

    async def _decide(self, instruction: MakePlan) -> TracedModel:
        """The model at the size of microbatch that the first plan chooses and all later ones keep. Raises PlacementError."""
        assert self.sizing is not None, "plans are asked for once the model is traced"
        async with self._deciding:
            if self._model is None:
                network = await self._links(instruction) if self.sizing.asked else None
                candidates = await self._offload.run(self.sizing.candidates, instruction.peers, network)
                sized = await self._best(candidates, instruction)
                if self.sizing.asked:
                    await self._offload.run(self._keep_job, sized.model.job)
                self._model = sized.model
                self._begin(sized.model, sized.feed)
        assert self._model is not None
        return self._model

    async def _best(self, candidates: Sequence[Sized], instruction: MakePlan) -> Sized:
        """The size that the plans made with what peers measure of each speak for. Raises PlacementError when none fits."""
        if len(candidates) == 1:
            return candidates[0]
        seconds: dict[int, float] = {}
        refusal: PlacementError | None = None
        for sized in candidates:
            self._surveyor.know(sized.model, sized.feed)
            surveyed = await self._survey(instruction.generation, instruction.peers, tell=False)
            try:
                proposal = await self._offload.run(sized.model.propose, surveyed.offers, surveyed.network)
            except PlacementError as error:
                refusal = error
            else:
                seconds[sized.feed.microbatch] = proposal.plan.step_seconds
        if not seconds:
            raise refusal or PlacementError("there is no size of microbatch to choose from")
        size = preferred(seconds)
        _log.info("microbatches have %d samples: seconds a step by size, as measured: %s", size, seconds)
        return next(sized for sized in candidates if sized.feed.microbatch == size)


def _merged(one: Holders, other: Holders) -> Holders:
    """Who has each name, be it in the one place or the other."""
    return {name: (*one.get(name, ()), *other.get(name, ())) for name in one.keys() | other.keys()}


def _around(instruction: MakePlan, shown: frozenset[frozenset[PeerId]]) -> Around | None:
    """The links that a plan must do without, except those that a probe has shown; None where there are none."""
    broken = instruction.broken - shown
    if not broken:
        return None
    return Around(
        broken=broken,
        previous=instruction.previous,
        holders=instruction.holders,
        on_disks=instruction.on_disks,
        steps_left=instruction.steps_left,
    )
