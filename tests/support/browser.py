"""A real browser without a window, for pages of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, async_playwright

from support.swarm import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
PICTURES = ROOT / "build" / "pictures"
"""Where tests leave what they saw."""
CI = "ATOLL_CI"
"""Set where a missing browser is an error, and not a reason to skip."""


@asynccontextmanager
async def browser_for_test() -> AsyncIterator[Browser]:
    """Chromium as it is installed here; skips the test where there is none."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        if os.environ.get(CI):
            pytest.fail("no Chromium is installed")
        pytest.skip("no Chromium is installed")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


async def picture(page: Page, name: str) -> Path:
    """Keeps what the page looks like now."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    await page.screenshot(path=path, full_page=True)
    return path
