"""The command `atoll`: which commands there are. What each does is in its own module.

Modules of commands import at the top only what is quick: `atoll --help` and `atoll status` do without torch.
"""

from __future__ import annotations

import typer

from atoll.coordinator.cli import dht, finished, invite, peers, plan, run, snapshots, status, swarm
from atoll.coordinator.cli.exits import exit_with

app = typer.Typer(
    name="atoll",
    help="Trains one neural network on many unequal computers joined by slow links.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("swarm")(swarm.command)
app.command("run")(run.command)
app.command("plan")(plan.command)
app.command("status")(status.status)
app.command("peers")(peers.command)
app.command("invite")(invite.command)
app.command("snapshots")(snapshots.snapshots)
app.command("stop")(status.stop)
app.command("replan")(status.replan)
app.command("export")(status.export)
app.command("report")(finished.report)
app.command("dht")(dht.command)
app.command("generate")(finished.generate)


def main() -> None:
    """Entry point of the console script."""
    exit_with(app)
