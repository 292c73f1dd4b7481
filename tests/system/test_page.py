"""The page of a run in a real browser: it shows what the run's events say, follows it, and says who is lost."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest
from aiohttp import ClientSession
from playwright.async_api import Page, expect

from support.browser import browser_for_test, picture
from support.swarm import LocalSwarm, started_swarm, write_job
from support.waiting import assert_eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SECONDS = 60.0
SOON_MILLISECONDS = 15_000
PHONE = {"width": 390, "height": 844}
NARROW_ENOUGH = "document.documentElement.scrollWidth <= window.innerWidth"


async def url_of(swarm: LocalSwarm) -> str:
    """Where the page is, as the command tells people."""
    log = swarm.state.parent / "swarm.log"
    found: list[str] = []

    def told() -> bool:
        found[:] = re.findall(r"the run's page is (\S+)", log.read_text())
        return bool(found)

    await assert_eventually(told, within_seconds=SECONDS)
    return found[0]


async def figures(page: Page) -> dict[str, float]:
    """The numbers at the top, as exact as the page has them."""
    found: list[dict[str, str]] = await page.evaluate("[...document.querySelectorAll('dd')].map((one) => ({...one.dataset}))")
    return {one["name"]: json.loads(one["value"]) for one in found}


async def holder_of_stage(swarm: LocalSwarm, stage: int) -> str:
    plan = await swarm.event("plan")
    name: str = plan["stages"][stage]["peers"][0]
    return name


def kill(swarm: LocalSwarm, peer: str) -> None:
    (process,) = [one for one in swarm.processes() if "--name" in (words := one.cmdline()) and peer in words]
    process.send_signal(signal.SIGKILL)


async def test_a_browser_follows_a_run_and_sees_who_is_lost(tmp_path: Path) -> None:
    training = {"steps": 400, "batch": 4, "microbatch": 1, "evaluate_every": 5}
    job = write_job(tmp_path, training=training, plan={"stages": 2})
    words = (job, "--peers", "3", "--page", "127.0.0.1:0")
    async with started_swarm(*words, state=tmp_path / "state") as swarm, browser_for_test() as browser:
        url = await url_of(swarm)
        page = await browser.new_page(viewport={"width": 1200, "height": 1000})
        errors: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(url)
        await swarm.event("step", step=6, within_seconds=SECONDS)
        await expect(page.locator("dd[data-name=step]")).to_contain_text("of 400", timeout=SOON_MILLISECONDS)
        await expect(page.locator("#timeline svg rect").first).to_be_visible(timeout=SOON_MILLISECONDS)
        await expect(page.locator("#map svg .link")).to_have_count(2, timeout=SOON_MILLISECONDS)
        await check_figures(page, swarm)
        await check_looks(page)
        lost = await holder_of_stage(swarm, 1)
        kill(swarm, lost)
        await expect(page.locator("#map svg .box.lost")).to_have_count(1, timeout=SOON_MILLISECONDS)
        await expect(page.locator("#happenings")).to_contain_text(f"{lost} lost", timeout=SOON_MILLISECONDS)
        await picture(page, "page-lost")
        await check_status(url, swarm)
        await expect(page.locator("#state")).to_contain_text("stopped from the page", timeout=SOON_MILLISECONDS)
        assert not errors


async def check_figures(page: Page, swarm: LocalSwarm) -> None:
    """What the page shows of its step is what the event of that step says."""
    shown = await figures(page)
    event = await swarm.event("step", step=shown["step"])
    assert (shown["loss"], shown["tokens/s"], shown["a step"]) == (event["loss"], event["tokens_per_second"], event["seconds"])
    losses = [one["loss"] for one in swarm.events if one["event"] == "evaluation"]
    assert shown["validation loss"] in losses


async def check_looks(page: Page) -> None:
    """It fits a desk, a phone, the light and the dark."""
    for name, scheme in (("light", "light"), ("dark", "dark")):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        await picture(page, f"page-{name}")
    assert await page.evaluate(NARROW_ENOUGH)
    await page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    assert await page.evaluate(NARROW_ENOUGH)
    await picture(page, "page-phone")


async def check_status(url: str, swarm: LocalSwarm) -> None:
    """The page's own answers: the numbers that the command prints, and actions for those who have the token alone."""
    async with ClientSession() as session:
        async with session.get(f"{url}api/status") as answer:
            status = await answer.json()
        assert (status["event"], status["steps"]) == ("status", 400)
        async with session.get(f"{url}metrics") as answer:
            numbers = await answer.text()
        assert re.search(r"^atoll_peers_lost_total 1\.0$", numbers, re.MULTILINE)
        async with session.post(f"{url}api/stop") as answer:
            assert answer.status == 403
        token = (swarm.state / "page-token").read_text().strip()
        assert (swarm.state / "page-token").stat().st_mode & 0o777 == 0o600
        async with session.post(f"{url}api/stop", headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 200
    await asyncio.wait_for(swarm.ended(), SECONDS)
