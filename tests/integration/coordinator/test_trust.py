"""Who was invited as trusted holds the ends; nobody else sees the data or the loss."""

from __future__ import annotations

import datetime
from pathlib import Path

from atoll.coordinator.events import PlanEvent, StepEvent
from atoll.coordinator.identity.authority import FOLDER, REGISTER, Authority
from atoll.coordinator.identity.register import Register
from atoll.coordinator.identity.run_identity import Wanted, invite
from support.coordinated import coordinated, tiny_job


def trusting_token(state: Path) -> str:
    """For two whom the operator trusts."""
    register = Register(state / FOLDER / REGISTER)
    try:
        wanted = Wanted(lifetime=datetime.timedelta(hours=1), uses=2, trusted=True)
        return invite(Authority.existing(state / FOLDER), register, wanted).text()
    finally:
        register.close()


async def test_the_ends_go_to_those_who_were_invited_as_trusted(tmp_path: Path) -> None:
    job, state = tiny_job(tmp_path, steps=2, plan={"stages": 3, "trusted_ends": True}), tmp_path / "state"
    async with coordinated(job, state, peers=0, min_peers=3, insecure=False) as run:
        run.join("mallory")
        run.join("ann", "bob", token=trusting_token(state), cache=tmp_path / "cache")
        assert (await run.ended()).finished
        stages = run.told(PlanEvent)[0].stages
        assert {*stages[0].peers, *stages[-1].peers} == {"ann", "bob"}
        assert stages[1].peers == ("mallory",)
        assert len(run.told(StepEvent)) == 2
