"""Each number on the page, in a real browser, is the one that ``--json`` has: in the tables, and in the figures at the top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from atoll.coordinator.cli.page.site import Site
from atoll.coordinator.cli.status import status_dict
from atoll.coordinator.events import EvaluationEvent
from atoll.protocol.v1.operator_pb2 import LinkStatus, PeerStatus, ReplanReply, SnapshotStatus, StatusReply
from support.browser import browser_for_test
from support.events import step_event

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

STATUS = StatusReply(
    run="numbers",
    state="training",
    step=3,
    steps=9,
    generation=2,
    predicted_step_seconds=0.12345678901,
    measured_step_seconds=0.2345678901,
    safe_snapshot=SnapshotStatus(step=2, age_seconds=1.5),
    peers=[
        PeerStatus(
            name=name,
            state="ready",
            stage=stage,
            layers="first - last",
            resident_bytes=123_456_789 + stage,
            predicted_memory_bytes=98_765_431 + stage,
            measured_compute_seconds=0.0123456789,
            predicted_compute_seconds=0.0198765432,
            silent_seconds=1.987654321,
        )
        for stage, name in enumerate(("ann", "bob"))
    ],
    links=[
        LinkStatus(
            source="ann",
            target="bob",
            direction="forward",
            codec="int8",
            measured_seconds=0.0456789012,
            measured_bytes_per_second=1_234_567.891,
            predicted_bytes_per_second=2_345_678.912,
            bytes=34_567_891,
            raw_bytes=134_567_891,
            relative_error=0.00345678912,
            damage=0.000456789123,
        )
    ],
)
EVENTS = [step_event(step, loss=5.123456789 - step, tokens=1000 + step, seconds=0.321 * step) for step in (1, 2, 3)]
EVALUATION = EvaluationEvent(step=3, loss=2.3456789012)
COLUMNS = {"peers": 5, "links": 7}
"""How many cells of a row have numbers."""


class Desk:
    """Stands still, so that there is one truth."""

    def status(self, *, timelines: bool = False) -> StatusReply:
        return STATUS

    def stop(self, reason: str) -> None: ...

    async def replan(self) -> ReplanReply:
        return ReplanReply()


async def shown(page: Page, selector: str) -> list[dict[str, Any]]:
    """The numbers of the elements there, by name, as exact as the page has them."""
    found: list[list[list[str]]] = await page.evaluate(
        "(where) => [...document.querySelectorAll(where)].map((row) =>"
        " [...row.querySelectorAll('[data-name]')].map((one) => [one.dataset.name, one.dataset.value]))",
        selector,
    )
    return [{name: json.loads(value) for name, value in row} for row in found]


async def test_each_number_on_the_page_is_that_of_json(tmp_path: Path) -> None:
    site = Site(listen="127.0.0.1:0", state=tmp_path, steps=STATUS.steps)
    url = await site.start(Desk())
    try:
        async with browser_for_test() as browser:
            for event in (*EVENTS, EVALUATION):
                site.event(event)
            page = await browser.new_page()
            await page.goto(url)
            await expect(page.locator("#links td")).not_to_have_count(0)
            await expect(page.locator("dd[data-name=step]")).to_have_count(1)
            await check_tables(page)
            await check_figures(page)
    finally:
        await site.stop()


async def check_tables(page: Page) -> None:
    """A row for each peer and link of ``atoll status --json``."""
    said = json.loads(json.dumps(status_dict(STATUS)))
    for table, columns in COLUMNS.items():
        rows = [row for row in await shown(page, f"#{table} tr") if row]
        assert [len(row) for row in rows] == [columns] * len(said[table])
        for row, wanted in zip(rows, said[table], strict=True):
            assert row == {name: wanted[name] for name in row}


async def check_figures(page: Page) -> None:
    """Those of the last step's event, and of the status."""
    step, evaluation = json.loads(EVENTS[-1].to_json()), json.loads(EVALUATION.to_json())
    assert await shown(page, "#figures") == [
        {
            "step": step["step"],
            "loss": step["loss"],
            "tokens/s": step["tokens_per_second"],
            "a step": step["seconds"],
            "validation loss": evaluation["loss"],
            "predicted": STATUS.predicted_step_seconds,
            "safe snapshot": STATUS.safe_snapshot.step,
        }
    ]
