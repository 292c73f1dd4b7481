"""`atoll report` and `atoll generate`: looks at the folder of a run that has trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from atoll.coordinator.cli.exits import UsageError
from atoll.coordinator.cli.options import AsJson
from atoll.coordinator.cli.report import summary_lines, write_curve
from atoll.coordinator.cli.report_story import tell
from atoll.coordinator.cli.state import newest_state
from atoll.coordinator.reading import read_told
from atoll.coordinator.run_files import CURVE, JOB, REPORT, WEIGHTS

Folder = Annotated[Path | None, typer.Argument(metavar="DIR", help="The run's state folder. Default: the newest run.")]


def report(folder: Folder = None, as_json: AsJson = False) -> None:
    """Writes a page about a run: its loss and plan, what was predicted and measured, what happened, what would be faster."""
    from atoll.coordinator.cli.report_page import write_report

    state = folder or newest_state()
    story = tell(list(read_told(state)))
    history = story.history
    if not history.losses:
        raise UsageError(f"no step has been committed in {state}")
    write_curve(history, state / CURVE, state.name)
    write_report(story, state / REPORT, state.resolve().name)
    if as_json:
        more = {"advice": story.advice, "page": str(state / REPORT)}
        print(json.dumps({"event": "report", **dataclasses.asdict(history), **more}))
    else:
        print("\n".join(summary_lines(history, state)))


def generate(
    folder: Folder = None,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "\n",
    length: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
) -> None:
    """Writes text with the language model that a run has trained."""
    from atoll.coordinator.cli.generate import sample
    from atoll.protocol.job import load_job

    state = folder or newest_state()
    if not (state / WEIGHTS).exists():
        raise UsageError(
            f"{state / WEIGHTS} is missing: the run has not finished, or `atoll export` gives its weights as of now"
        )
    text = sample(load_job(state / JOB), state / WEIGHTS, prompt=prompt, length=length)
    if text is None:
        raise UsageError(f"the run in {state} trains no language model on text")
    print(prompt.lstrip("\n") + text)
