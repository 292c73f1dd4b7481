"""A coordinator in this process, with peers in this process too: real ones, and ones that say only what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from atoll.coordinator.cli.invite import invite_for_swarm
from atoll.coordinator.events import Event
from atoll.coordinator.identity.authority import FOLDER, OPERATOR, read_credentials
from atoll.coordinator.run.deadlines import Deadlines
from atoll.coordinator.server import Coordinator, Outcome
from atoll.coordinator.settings import CoordinatorSettings
from atoll.peer.daemon import Peer
from atoll.peer.session.values import Outcome as PeerOutcome
from atoll.peer.settings import PeerSettings
from atoll.protocol.certificates import certificate_of_pem
from atoll.protocol.channel import PROTOCOL_VERSION, open_channel, parse_address
from atoll.protocol.framing import Arrived, MessageStream
from atoll.protocol.identity import Verifier
from atoll.protocol.ids import PeerId
from atoll.protocol.job import Job, parse_job
from atoll.protocol.measurement import REQUEST_TENSOR, request_from_bytes
from atoll.protocol.messages import Kind
from atoll.protocol.outbox import Outbox
from atoll.protocol.pump import STREAM_ERRORS
from atoll.protocol.security import Credentials, MutualTls, PlainText, Security
from atoll.protocol.transfer import COORDINATOR
from atoll.protocol.v1 import operator_pb2_grpc, session_pb2, session_pb2_grpc
from support.waiting import assert_eventually

WAIT_SECONDS = 90.0
CANNOT = "it is scripted"
EventType = TypeVar("EventType", bound=Event)


def tiny_job(folder: Path, **training: Any) -> Job:
    """A GPT of three narrow layers on a little text; ``training`` changes that section, ``options`` the model's."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(2000)))
    options = {"layers": 3, "width": 16, "heads": 2, "context": 32, **training.pop("options", {})}
    plan = training.pop("plan", {})
    return parse_job(
        {
            "name": "tiny",
            "model": {"builtin": "gpt", "options": options, **training.pop("model", {})},
            "data": {"text": str(text), "sequence_length": 32, "validation": 0.1},
            "training": {"steps": 3, "batch": 4, "microbatch": 2, "clip_norm": 1.0, "evaluation_batches": 1, **training},
            "plan": plan,
        },
        folder,
    )


class Coordinated:
    """A running coordinator, what it told, and its peers."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.events: list[Event] = []
        self.coordinator = Coordinator(settings, on_event=self.events.append)
        self.address = ""
        self._run: asyncio.Task[Outcome] | None = None
        self._peers: dict[str, tuple[Peer, asyncio.Task[PeerOutcome]]] = {}

    async def start(self) -> None:
        self.address = await self.coordinator.start()
        self._run = asyncio.create_task(self.coordinator.run())

    def join(self, *names: str, **settings: Any) -> None:
        """Real peers join; each says that it is as fast as the others, so that the plan is even."""
        for name in names:
            chosen: dict[str, Any] = {"threads": 1, "flops_per_second": 1e9, **self._admission(), **settings}
            peer = Peer(PeerSettings(coordinator=parse_address(self.address), name=name, **chosen))
            self._peers[name] = peer, asyncio.create_task(peer.run())

    def _admission(self) -> dict[str, Any]:
        """How a peer is let in."""
        if self.settings.insecure:
            return {"insecure": True}
        return {"token": invite_for_swarm(self.settings.state)}

    def kill(self, name: str) -> None:
        """The peer is gone without a word."""
        self._peers[name][1].cancel()

    def peer(self, name: str) -> Peer:
        return self._peers[name][0]

    async def ended(self) -> Outcome:
        assert self._run is not None
        return await asyncio.wait_for(asyncio.shield(self._run), WAIT_SECONDS)

    async def peer_ended(self, name: str) -> PeerOutcome:
        return await asyncio.wait_for(self._peers[name][1], WAIT_SECONDS)

    def told(self, kind: type[EventType]) -> list[EventType]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, check: Callable[[], bool | Awaitable[bool]], what: str = "") -> None:
        """Wait until something holds of the run."""
        await assert_eventually(check, within_seconds=WAIT_SECONDS, what=what)

    async def until_told(self, kind: type[EventType], **fields: Any) -> EventType:
        """Wait for an event with these fields."""

        def matching() -> list[EventType]:
            return [event for event in self.told(kind) if all(getattr(event, key) == value for key, value in fields.items())]

        await self.until(lambda: bool(matching()), f"no {kind.__name__} with {fields} among {self.events}")
        return matching()[0]

    async def until_waiting(self, text: str) -> None:
        """Wait until the status says that it waits for this."""
        await self.until(lambda: text in self.coordinator.status().reason, f"the status never said {text!r}")

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[operator_pb2_grpc.OperatorStub]:
        """The operator's RPCs."""
        security: Security = PlainText()
        if not self.settings.insecure:
            security = _shown(read_credentials(self.settings.state / FOLDER / OPERATOR))
        async with open_channel(self.address, security) as channel:
            yield operator_pb2_grpc.OperatorStub(channel)

    async def close(self) -> None:
        """End everything."""
        self.coordinator.request_stop("the test is over")
        if self._run is not None:
            await asyncio.wait((self._run,), timeout=WAIT_SECONDS)
        tasks = [task for _, task in self._peers.values()]
        if tasks:
            # Not cancelled while they put their affairs in order.
            _, left = await asyncio.wait(tasks, timeout=WAIT_SECONDS)
            assert not left, "a peer did not end with the run"


@asynccontextmanager
async def coordinated(
    job: Job, state: Path, *, peers: int = 2, min_peers: int | None = None, **settings: Any
) -> AsyncIterator[Coordinated]:
    """A coordinator that waits for ``peers`` peers, and as many of them, named peer-0 and so on."""
    deadlines = settings.pop("deadlines", Deadlines(settle_seconds=0.05))
    settings.setdefault("insecure", True)
    settings.setdefault("lease_seconds", 60.0)  # scripted peers do not renew theirs, and the machine may be busy
    chosen = CoordinatorSettings(
        job=job, listen="127.0.0.1:0", state=state, min_peers=min_peers or max(1, peers), deadlines=deadlines, **settings
    )
    run = Coordinated(chosen)
    await run.start()
    run.join(*(f"peer-{index}" for index in range(peers)))
    try:
        yield run
    finally:
        await run.close()


def join_with_disks(run: Coordinated, folder: Path, *names: str) -> None:
    """Peers join, each with a cache of its own under ``folder``."""
    for name in names:
        run.join(name, cache=folder / name)


def _shown(credentials: Credentials) -> Security:
    return MutualTls(credentials, Verifier(certificate_of_pem(credentials.authority)))


class ScriptedPeer:
    """A peer's end of a session that does nothing by itself but take frames and say that it has them, and answer that it can
    measure nothing; ``surveyed`` False: it does not even say that. ``works_seconds``: what it says of every kind of segment."""

    def __init__(
        self, coordinator: str, name: str, /, *, surveyed: bool = True, works_seconds: float | None = None, **join: Any
    ) -> None:
        self.heard: list[session_pb2.CoordinatorMessage] = []
        self.messages: list[Arrived] = []
        self.asked_to_measure: list[str] = []
        self._surveyed = surveyed
        self._works_seconds = works_seconds
        self.closed = False
        self._channel = open_channel(coordinator)
        self.stub = session_pb2_grpc.CoordinatorStub(self._channel)
        stream = MessageStream(lambda header: None)
        self._outbox: Outbox[session_pb2.PeerMessage] = Outbox(
            own=PeerId(name), other=COORDINATOR, stream=stream, wrap=lambda frame: session_pb2.PeerMessage(frame=frame)
        )
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "version": "0.1.0",
            "name": name,
            "address": "127.0.0.1:1",
            "device": "cpu",
            "threads": 1,
            "memory_bytes": 10**9,
            "flops_per_second": 1e9,
        }
        self.say(join=session_pb2.Join(**{**fields, **join}))
        call = self.stub.Session()
        self._tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]

    def say(self, **content: Any) -> None:
        """Send a control message, for example ``say(ready=Ready(generation=1))``."""
        self._outbox.put(session_pb2.PeerMessage(**content))

    async def hears(self, content: str) -> Any:
        """The first control message of that kind."""

        def found() -> list[Any]:
            return [getattr(message, content) for message in self.heard if message.WhichOneof("content") == content]

        await assert_eventually(lambda: bool(found()), within_seconds=WAIT_SECONDS, what=f"never heard {content}")
        return found()[0]

    async def takes(self, count: int) -> None:
        """Wait until that many whole messages have arrived."""
        await assert_eventually(lambda: len(self.messages) >= count, within_seconds=WAIT_SECONDS)

    async def close(self) -> None:
        """Gone, without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(grace=None)

    async def _read(self, call: Any) -> None:
        try:
            while isinstance(message := await call.read(), session_pb2.CoordinatorMessage):
                if message.WhichOneof("content") == "frame":
                    for event in self._outbox.handle(message.frame):
                        if isinstance(event, Arrived):
                            self._take(event)
                    continue
                self.heard.append(message)
                if self._surveyed and message.HasField("probe"):
                    self.say(probed=session_pb2.Probed(number=message.probe.number, failure=CANNOT))
        except STREAM_ERRORS:
            pass
        finally:
            self.closed = True

    def _take(self, arrived: Arrived) -> None:
        if arrived.message.key.kind is not Kind.MEASUREMENT:
            self.messages.append(arrived)
            return
        data = next(tensor.data for tensor in arrived.message.tensors if tensor.name == REQUEST_TENSOR)
        kind = request_from_bytes(bytes(data)).kind
        self.asked_to_measure.append(kind)
        if self._works_seconds is not None:
            seconds = self._works_seconds
            self.say(measured=session_pb2.Measured(kind=kind, forward_seconds=seconds, backward_seconds=seconds))
        elif self._surveyed:
            self.say(measured=session_pb2.Measured(kind=kind, failure=CANNOT))

    async def _write(self, call: Any) -> None:
        while (dispatch := await self._outbox.next()) is not None:
            await call.write(dispatch.item)
