"""The report of a run as one HTML file that needs nothing else: no script, no picture and no style from elsewhere."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from atoll.coordinator.cli import formatting
from atoll.coordinator.cli.report_story import Story, comparisons
from atoll.coordinator.run_files import write_whole

Points = Sequence[tuple[int, float]]


def write_report(story: Story, path: Path, title: str) -> None:
    """Writes the page; readers see the whole file or the one before."""
    page = _environment().get_template("report.html")
    text = page.render(
        title=title,
        story=story,
        comparisons=comparisons(story),
        loss=_plot({"training": story.history.losses, "validation": story.history.validation}, "loss"),
        throughput=_plot({"throughput": story.throughput}, "tokens/s"),
        formatting=formatting,
    )
    write_whole(path, text)


def _environment() -> Environment:
    """Everything that a template is given is text, never markup, unless it says so: names and reasons come from peers."""
    loader = PackageLoader("atoll.coordinator.cli", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _plot(lines: dict[str, Points], label: str) -> Markup:
    """An SVG that takes its colours from the page, so that it is readable on dark and on light."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        for name, points in lines.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2, marker="o" if len(points) < 30 else None)
        if sum(1 for points in lines.values() if points) > 1:
            axes.legend(framealpha=0.0)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        written = io.StringIO()
        figure.savefig(written, format="svg")
    picture = written.getvalue()
    return Markup(picture[picture.index("<svg") :].replace("#000000", "currentColor"))
