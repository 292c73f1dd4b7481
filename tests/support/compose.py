"""A swarm in containers, through docker compose."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.browser import CI
from support.swarm import ROOT

PROJECT = "atoll-test"
FILE = ROOT / "docker" / "compose.yaml"
BUILD_SECONDS = 1200.0
COMMAND_SECONDS = 180.0


def engine_or_skip() -> list[str]:
    """The words that call compose; skips the test where no engine runs, which is an error in CI."""
    ways = [words for words in (["docker", "compose"], ["docker-compose"]) if _works(*words, "version")]
    if ways and _works("docker", "info"):
        return ways[0]
    if os.environ.get(CI):
        pytest.fail("no Docker engine with compose runs here")
    pytest.skip("no Docker engine with compose runs here")


def _works(*words: str) -> bool:
    found = shutil.which(words[0]) is not None
    return found and subprocess.run(words, capture_output=True, timeout=60).returncode == 0


class Compose:
    """The containers of one project. ``files`` are compose files, the first in the repository's docker folder."""

    def __init__(self, words: Sequence[str], files: Sequence[Path], variables: Mapping[str, str]) -> None:
        self._words = [*words, "--project-name", PROJECT, *(word for file in files for word in ("--file", str(file)))]
        self._variables = {**os.environ, **variables}

    async def run(self, *words: str, within_seconds: float = COMMAND_SECONDS) -> str:
        """What compose says; it must succeed."""
        return await command(*self._words, *words, variables=self._variables, within_seconds=within_seconds)

    async def containers(self, service: str) -> list[str]:
        """The ids of a service's containers."""
        return (await self.run("ps", "--quiet", service)).split()

    async def image_bytes(self) -> int:
        """The size of the image that a container of the coordinator is made from."""
        (coordinator,) = await self.containers("coordinator")
        image = (await command("docker", "inspect", "--format", "{{.Image}}", coordinator)).strip()
        return int(await command("docker", "image", "inspect", "--format", "{{.Size}}", image))

    async def left(self) -> list[str]:
        """Containers, networks and volumes of the project that are there."""
        label = f"label=com.docker.compose.project={PROJECT}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [line for kind in kinds for line in (await command("docker", *kind, "--quiet", "--filter", label)).split()]


async def command(*words: str, variables: Mapping[str, str] | None = None, within_seconds: float = COMMAND_SECONDS) -> str:
    """The output of a command that must succeed in time."""
    process = await asyncio.create_subprocess_exec(
        *words, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), within_seconds)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, f"{' '.join(words)}: {output.decode()}{errors.decode()}"
    return output.decode()


def _overlay(job_folder: Path) -> Path:
    """A compose file that shows the folder, at its own path, to the coordinator, whose user is not ours, and leaves it to the
    test to start that again."""
    job_folder.chmod(0o755)
    overlay = job_folder / "overlay.yaml"
    coordinator = {"volumes": [f"{job_folder}:{job_folder}:ro"], "restart": "no"}
    overlay.write_text(yaml.safe_dump({"services": {"coordinator": coordinator}}))
    return overlay


@asynccontextmanager
async def composed(job: Path, variables: Mapping[str, str]) -> AsyncIterator[Compose]:
    """The swarm of docker/compose.yaml with a job of ours, which finds what lies beside it; nothing is left of it. Where the
    test fails, what the containers said last is printed."""
    words = engine_or_skip()
    compose = Compose(words, [FILE, _overlay(job.parent)], {"ATOLL_JOB": str(job), **variables})
    await compose.run("build", "coordinator", within_seconds=BUILD_SECONDS)
    try:
        yield compose
    except BaseException:
        print(await compose.run("logs", "--tail", "20"))
        raise
    finally:
        await compose.run("down", "--volumes", "--timeout", "20")


async def copied(container: str, path: str, folder: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file of a container."""
    target = folder / Path(path).name
    await command("docker", "cp", f"{container}:{path}", str(target))
    return [json.loads(line) for line in target.read_text().splitlines()]
