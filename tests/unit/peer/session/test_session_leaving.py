"""A session that is asked to leave: it works on until it may go, and goes at once when it must."""

from __future__ import annotations

import pytest

from atoll.peer.session.session import Session
from atoll.peer.session.values import (
    ConnectionLost,
    ExitCode,
    Finish,
    Instruction,
    LeaveLater,
    LeaveRequested,
    SessionEvent,
    SessionState,
    Tell,
    Warn,
)
from atoll.protocol.v1 import session_pb2 as pb

PATIENT = LeaveRequested(reason="told to end", exit_code=ExitCode.INTERRUPTED, hand_over_seconds=30.0)
WELCOME = pb.CoordinatorMessage(welcome=pb.Welcome(run="r", name="ann"))
MAY_LEAVE = pb.CoordinatorMessage(may_leave=pb.MayLeave())


def after(*events: SessionEvent) -> tuple[Session, list[Instruction]]:
    session, last = Session(), list[Instruction]()
    for event in events:
        last = session.handle(event)
    return session, last


def test_a_leave_with_time_is_announced_and_the_session_goes_on() -> None:
    session, last = after(WELCOME, PATIENT)
    told = pb.PeerMessage(leave=pb.Leave(reason="told to end", hand_over_seconds=30.0))
    assert last == [Tell(told), LeaveLater(PATIENT)]
    assert session.state is SessionState.IDLE


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (MAY_LEAVE, "told to end; nothing is lost with this peer"),
        (ConnectionLost(reason="the coordinator ended"), "told to end; the coordinator ended"),
        (pb.CoordinatorMessage(end=pb.End(finished=True, reason="the run finished")), "the run finished"),
        (
            pb.CoordinatorMessage(end=pb.End(finished=False, reason="interrupted")),
            "told to end; the run has ended: interrupted",
        ),
    ],
)
def test_a_peer_that_left_as_it_announced_ends_with_success(event: SessionEvent, words: str) -> None:
    session, last = after(WELCOME, PATIENT, event)
    (finish,) = [item for item in last if isinstance(item, Finish)]
    assert (finish.outcome.exit_code, finish.outcome.reason) == (ExitCode.FINISHED, words)
    assert session.state is SessionState.ENDED


def test_a_second_request_ends_it_at_once() -> None:
    _, last = after(WELCOME, PATIENT, PATIENT)
    assert last[0] == Tell(pb.PeerMessage(leave=pb.Leave(reason="told to end")))
    assert isinstance(last[1], Finish)
    assert last[1].outcome.exit_code == ExitCode.INTERRUPTED


def test_without_a_session_there_is_nothing_to_hand_over() -> None:
    session, _ = after(PATIENT)
    assert session.state is SessionState.ENDED


def test_that_nobody_can_take_over_is_told_to_the_owner() -> None:
    session, last = after(WELCOME, PATIENT, pb.CoordinatorMessage(cannot_hand_over=pb.CannotHandOver(reason="too few")))
    assert last == [Warn("nobody can take the layers of this peer yet: too few")]
    assert session.state is SessionState.IDLE


def test_to_be_let_go_without_having_asked_breaks_the_protocol() -> None:
    session, _ = after(WELCOME, MAY_LEAVE)
    assert session.state is SessionState.ENDED
