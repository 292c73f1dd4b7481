"""The least lossy codec that hides behind computing: faster links never get a lossier one, and nothing is lost for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.compression.policy import (
    BARRED_STEPS,
    NOTICEABLE,
    PATIENCE_STEPS,
    WAKING_SECONDS_A_BYTE,
    Choice,
    CodecPolicy,
    Demand,
    Pace,
    Rung,
    first_choices,
    fitting,
    ladder,
)
from atoll.compression.registry import codec_names
from atoll.protocol.codec_names import LADDER

RUNGS = (
    Rung(name="raw"),
    Rung(name="bf16", ratio=0.5, encode_bytes_per_second=5e9, decode_bytes_per_second=5e9),
    Rung(name="int8", ratio=0.26, encode_bytes_per_second=2e9, decode_bytes_per_second=3e9),
    Rung(name="int4", ratio=0.14, encode_bytes_per_second=1e9, decode_bytes_per_second=1e9),
)
PACE = Pace(microbatch_seconds=0.1, num_microbatches=8, fill_seconds=0.1)
MEGABYTE = 1e6
SLOW, FAST = Demand(raw_bytes=MEGABYTE, bytes_per_second=1.3e7), Demand(raw_bytes=MEGABYTE, bytes_per_second=1e9)

rates = st.floats(1e3, 1e11)
paces = st.builds(
    Pace, microbatch_seconds=st.floats(1e-5, 10.0), num_microbatches=st.integers(1, 64), fill_seconds=st.floats(0.0, 10.0)
)


def held_back(rung: Rung, demand: Demand, pace: Pace) -> float:
    return pace.held_back(rung, demand)


class Run:
    """One link, step after step."""

    def __init__(self, codec: str = "raw", rungs: tuple[Rung, ...] = RUNGS) -> None:
        self.policy: CodecPolicy[str] = CodecPolicy()
        self.step = 0
        self.begin(codec, rungs)

    def begin(self, codec: str, rungs: tuple[Rung, ...] = RUNGS) -> None:
        """Under a new plan."""
        self.policy.start("link", rungs, codec)

    @property
    def codec(self) -> str:
        return self.policy.codecs["link"]

    def choices(self, demand: Demand, step_seconds: float | None, **harm: str) -> tuple[Choice[str], ...]:
        """What changes after one more step."""
        self.step += 1
        return self.policy.decide(self.step, {"link": demand}, replace(PACE, step_seconds=step_seconds), harm)

    def after(self, demand: Demand, step_seconds: float, **harm: str) -> str:
        """The codec after one more step."""
        self.choices(demand, step_seconds, **harm)
        return self.codec


@given(paces, st.floats(1.0, 1e9), rates, rates, st.floats(0.0, 1.0))
def test_a_faster_link_never_gets_a_lossier_codec(pace: Pace, size: float, one: float, other: float, share: float) -> None:
    slower, faster = sorted((one, other))
    tolerated = share * pace.ideal_seconds
    demand = Demand(raw_bytes=size, bytes_per_second=slower, encoding_share=share, decoding_share=share)
    at_slower, at_faster = (
        fitting(RUNGS, replace(demand, bytes_per_second=rate), pace, tolerated) for rate in (slower, faster)
    )
    assert at_faster <= at_slower


@given(paces, st.floats(1.0, 1e9), rates)
def test_what_is_chosen_is_nearly_as_fast_as_the_fastest_and_nothing_less_lossy_is(
    pace: Pace, size: float, rate: float
) -> None:
    demand = Demand(raw_bytes=size, bytes_per_second=rate)
    tolerated = NOTICEABLE * pace.ideal_seconds
    found = fitting(RUNGS, demand, pace, tolerated)
    enough = min(held_back(rung, demand, pace) for rung in RUNGS) + tolerated
    assert held_back(RUNGS[found], demand, pace) <= enough
    assert all(held_back(rung, demand, pace) > enough for rung in RUNGS[:found])


@given(paces, st.floats(1.0, 1e9), rates)
def test_first_choices_lose_bits_for_a_noticeable_gain_only(pace: Pace, size: float, rate: float) -> None:
    demand = Demand(raw_bytes=size, bytes_per_second=rate)
    (chosen,) = first_choices([RUNGS], [demand], pace)
    if chosen.name != "raw":
        gain = held_back(RUNGS[0], demand, pace) - held_back(chosen, demand, pace)
        assert gain > NOTICEABLE * pace.ideal_seconds


def test_a_link_that_no_codec_makes_fast_enough_sets_the_pace_for_the_others() -> None:
    hopeless, better = Demand(raw_bytes=MEGABYTE, bytes_per_second=1e5), Demand(raw_bytes=MEGABYTE, bytes_per_second=2.5e6)
    assert [rung.name for rung in first_choices([RUNGS, RUNGS], [hopeless, better], PACE)] == ["int4", "int8"]
    assert first_choices([RUNGS], [better], PACE)[0].name == "int4"


@pytest.mark.parametrize("rate", [1e9, float("inf")])
def test_a_fast_link_stays_raw(rate: float) -> None:
    demand = Demand(raw_bytes=MEGABYTE, bytes_per_second=rate)
    assert first_choices([RUNGS] * 2, [demand] * 2, PACE) == (RUNGS[0],) * 2


def test_encoding_that_is_slower_than_the_link_is_not_chosen() -> None:
    slow_coder = (RUNGS[0], Rung(name="int8", ratio=0.26, encode_bytes_per_second=1e6, decode_bytes_per_second=1e6))
    assert first_choices([slow_coder], [SLOW], PACE)[0].name == "raw"


def test_a_slow_link_gets_a_lossier_codec_at_once_and_a_reason() -> None:
    (choice,) = Run().choices(SLOW, 3.5)
    assert (choice.place, choice.codec) == ("link", "int8")
    assert choice.reason == "raw holds a step back by 0.0769 s, where computing takes 0.9 s"


def test_nothing_is_lost_where_steps_wait_for_no_link() -> None:
    """The link looks slow, for the machine is busy; but computing takes all of the step."""
    run = Run()
    assert run.choices(SLOW, 1.01 * PACE.ideal_seconds) == ()
    assert run.choices(SLOW, None) == ()  # no step was measured


def test_a_link_that_becomes_faster_gets_a_less_lossy_codec_after_several_steps() -> None:
    run = Run("int8")
    assert [run.after(FAST, 1.0) for _ in range(PATIENCE_STEPS)] == ["int8"] * (PATIENCE_STEPS - 1) + ["raw"]


def test_one_slow_step_between_fast_ones_begins_the_wait_anew() -> None:
    run = Run("int8")
    demands = [FAST] * (PATIENCE_STEPS - 1) + [SLOW] + [FAST] * (PATIENCE_STEPS - 1)
    assert {run.after(demand, 1.0) for demand in demands} == {"int8"}


def test_a_link_that_just_keeps_the_pace_has_no_margin_for_a_less_lossy_codec() -> None:
    exact = Demand(raw_bytes=MEGABYTE, bytes_per_second=4e7)
    assert first_choices([RUNGS], [exact], PACE)[0].name == "bf16"
    run = Run("int8")
    assert {run.after(exact, 1.0) for _ in range(2 * PATIENCE_STEPS)} == {"int8"}


def test_what_does_harm_is_barred_for_longer_each_time() -> None:
    run, waits = Run(), []
    for _ in range(2):
        assert run.after(SLOW, 1.0) == "int8"
        assert run.after(SLOW, 1.0, link="costs 2 % of the loss") == "bf16"
        began = run.step
        while run.after(SLOW, 1.0) == "bf16":
            assert run.step - began < 4 * BARRED_STEPS
        waits.append(run.step - began)
        run.begin("raw")
    assert waits == [BARRED_STEPS, 2 * BARRED_STEPS]


def test_harm_at_the_first_rung_changes_nothing() -> None:
    assert Run().choices(FAST, 1.0, link="costs much") == ()


def test_a_fixed_codec_stays() -> None:
    run = Run("int4", RUNGS[3:])
    assert run.choices(FAST, 9.0, link="costs much") == ()
    assert run.codec == "int4"


def test_an_earlier_plans_lesson_is_kept_for_links_that_stay() -> None:
    run = Run("int8")
    run.choices(FAST, 1.0, link="costs much")
    run.policy.keep_only(["link"])
    run.begin("int8")
    assert run.codec == "bf16"
    run.policy.keep_only([])
    run.begin("int8")
    assert run.codec == "int8"


def test_a_ladder_respects_its_bounds() -> None:
    known = codec_names()
    assert ladder(known)[:3] == ("raw", "bf16", "int8")
    assert "int2" not in ladder(known)
    assert ladder(known, floor="int8") == ("raw", "bf16", "int8")
    assert ladder(known, floor="raw") == ("raw",)
    assert ladder(known, floor="int2")[-1] == "int2"
    assert ladder(known, floor="int8", ceiling="bf16") == ("bf16", "int8")
    assert ladder(known, ceiling="int2") == ("int2",)


def test_every_known_rung_is_shorter_than_raw() -> None:
    assert {"raw", "bf16", "int8", "int4"} <= set(LADDER) & set(codec_names())


def test_where_no_core_is_free_coding_costs_computing_and_a_cheaper_codec_is_taken() -> None:
    slow_coder = Rung(name="transform", ratio=0.07, encode_bytes_per_second=1.3e8, decode_bytes_per_second=2e8)
    quick_coder = Rung(name="int8", ratio=0.26, encode_bytes_per_second=2e9, decode_bytes_per_second=3e9)
    pace = Pace(microbatch_seconds=0.5, num_microbatches=8)
    free = Demand(raw_bytes=MEGABYTE, bytes_per_second=4e6)
    crowded = replace(free, encoding_share=0.5, decoding_share=0.5)
    assert free.stolen(slow_coder) == 0.0
    waking = 2 * 0.07 * MEGABYTE * WAKING_SECONDS_A_BYTE
    assert crowded.stolen(slow_coder) == pytest.approx(0.5 * (MEGABYTE / 1.3e8 + MEGABYTE / 2e8 + waking))
    assert held_back(slow_coder, free, pace) < held_back(quick_coder, free, pace)
    crowded = replace(crowded, bytes_per_second=8e6)
    assert held_back(slow_coder, crowded, pace) > held_back(quick_coder, crowded, pace)


@pytest.mark.parametrize(("rate", "lost"), [(1.25e6, 0.02), (12.5e6, 0.02), (125e6, 0.002), (float("inf"), 0.0)])
def test_packets_that_come_one_by_one_cost_computing_and_bunches_less(rate: float, lost: float) -> None:
    crowded = Demand(raw_bytes=MEGABYTE, bytes_per_second=rate, encoding_share=1.0, decoding_share=1.0)
    assert crowded.stolen(RUNGS[0]) == pytest.approx(lost)
