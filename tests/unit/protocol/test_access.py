"""Every RPC is for somebody, and callers stay within limits."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import atoll.protocol.v1
from atoll.protocol.access import ALLOWED, is_allowed, refusal
from atoll.protocol.call_limits import CallLimits
from atoll.protocol.handshakes import REPORT_SECONDS, WAIT_SECONDS, HandshakeWatch
from atoll.protocol.identity import Role


def methods() -> set[str]:
    """All RPCs of all services, as gRPC writes them."""
    names = [module.name for module in pkgutil.iter_modules(atoll.protocol.v1.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"atoll.protocol.v1.{name}").DESCRIPTOR for name in names]
    services = [service for file in files for service in file.services_by_name.values()]
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert methods() == set(ALLOWED)
    assert all(ALLOWED.values()), "an RPC for nobody need not exist"


def test_a_token_serves_to_enrol_and_for_nothing_else() -> None:
    assert {method for method in methods() if is_allowed(method, Role.INVITATION)} == {"/atoll.protocol.v1.Enrolment/Enrol"}


def test_only_the_operator_may_call_the_operators_service() -> None:
    for method in methods():
        if ".Operator/" in method:
            assert ALLOWED[method] == {Role.OPERATOR}
        else:
            assert not is_allowed(method, Role.OPERATOR)


def test_what_is_not_in_the_table_is_for_nobody() -> None:
    assert not is_allowed("/atoll.protocol.v1.Operator/Explode", Role.OPERATOR)
    assert "nobody may call" in refusal("/x/y", Role.OPERATOR)


def test_calls_at_once_are_counted_by_caller() -> None:
    limits = CallLimits(at_once=2)
    assert limits.begin("ann", 0.0) is None
    assert limits.begin("ann", 0.0) is None
    assert "ann has 2 calls open" in (limits.begin("ann", 0.0) or "")
    assert limits.begin("bob", 0.0) is None
    limits.end("ann")
    assert limits.begin("ann", 0.0) is None


def test_calls_in_a_row_are_limited_until_time_has_passed() -> None:
    limits = CallLimits(per_second=2.0, burst=3.0)

    def call(now: float) -> str | None:
        answer = limits.begin("ann", now)
        if answer is None:
            limits.end("ann")
        return answer

    assert [call(0.0) is None for _ in range(4)] == [True, True, True, False]
    assert "more than 2 times a second" in (call(0.1) or "")
    assert call(0.6) is None
    assert call(0.6) is not None


@pytest.mark.parametrize("said", [0, 1, 2])
def test_connections_that_never_call_are_reported_once_in_a_while(said: int) -> None:
    watch = HandshakeWatch()
    for _ in range(2):
        watch.began(0.0)
    for index in range(said):
        watch.spoke(f"ipv4:1.2.3.4:{index}", 1.0)
        watch.spoke(f"ipv4:1.2.3.4:{index}", 1.0)
    assert watch.report(WAIT_SECONDS / 2) is None, "they may still come through"
    text = watch.report(WAIT_SECONDS + 1)
    assert (text or "").startswith(("", "1 connection was", "2 connections were")[2 - said])
    assert (text is None) is (said == 2)
    watch.began(WAIT_SECONDS + 2)
    soon = watch.report(2 * WAIT_SECONDS + 5)
    assert said == 2 or soon is None, "not more than once a minute"
    assert said == 2 or watch.report(WAIT_SECONDS + REPORT_SECONDS + 1) is not None
