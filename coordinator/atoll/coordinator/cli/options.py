"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JobOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the job; may be repeated.")
]
NewState = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Folder for the whole run. Default: runs/NAME-N.")
]
Page = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Show the run there, to browsers and to Prometheus; :8080 is all addresses."),
]
TensorBoardFolder = Annotated[
    Path | None, typer.Option("--tensorboard", metavar="DIR", help="Write curves there for TensorBoard, if it is installed.")
]
WandbProject = Annotated[
    str | None, typer.Option("--wandb", metavar="PROJECT", help="Log curves to Weights & Biases, if it is installed.")
]
InitialPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--initial-peers", metavar="ADDRESS", help="A node of the DHT to begin with (/ip4/.../p2p/...); may be repeated."
    ),
]
DhtListen = Annotated[
    str | None,
    typer.Option("--dht-listen", metavar="HOST:PORT", help="Where the DHT's other nodes reach this one. Default: any port."),
]
EventsAsJson = Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")]

Target = Annotated[
    str | None, typer.Argument(metavar="HOST:PORT|DIR", help="The coordinator, or the state folder. Default: the newest run.")
]
ExistingState = Annotated[Path | None, typer.Option("--state", metavar="DIR", help="The run's state folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
