"""Findings for people, as a table that grows, or as JSON lines."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.live import Live
from rich.table import Table

from atoll.peer.doctor.diagnosis import Finding, Verdict, is_fit
from atoll.peer.doctor.doctor import examine
from atoll.peer.settings import PeerSettings

_STYLES = {Verdict.GOOD: "green", Verdict.POOR: "yellow", Verdict.BAD: "bold red", Verdict.UNKNOWN: "dim"}


async def show(settings: PeerSettings, *, as_json: bool) -> list[Finding]:
    """Prints each finding as it comes; all of them."""
    findings: list[Finding] = []
    if as_json:
        async for finding in examine(settings):
            print(finding.as_json(), flush=True)
            findings.append(finding)
        return findings
    console = Console()
    growing = Live(console=console, auto_refresh=False, vertical_overflow="visible", transient=True)
    with growing if console.is_terminal else contextlib.nullcontext():
        async for finding in examine(settings):
            findings.append(finding)
            growing.update(_table(findings), refresh=console.is_terminal)
    console.print(_table(findings))
    console.print("This machine can work for the run." if is_fit(findings) else "What is bad keeps this machine from working.")
    return findings


def _table(findings: list[Finding]) -> Table:
    table = Table("", "verdict", "found", "what mends it", header_style="bold")
    for finding in findings:
        verdict = f"[{_STYLES[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.subject, verdict, finding.found.replace("[", "\\["), finding.mend.replace("[", "\\["))
    return table
