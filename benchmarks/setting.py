"""What is measured: the model, the batch, and where it runs; the same for both sides."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

HOSTS_VARIABLE = "ATOLL_TEST_HOSTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A GPT in ``stages`` stages; a step is ``microbatches`` microbatches of ``sequences`` sequences of ``context`` tokens.
    ``planned``: Atoll decides for itself how many stages there are, and how many sequences a microbatch has. ``text``: tokens
    are bytes of Python's standard library instead of random ones, in which a codec finds nothing to save."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 256
    vocabulary: int = 256
    stages: int = 4
    microbatches: int = 8
    sequences: int = 2
    threads: int = 1
    learning_rate: float = 0.01
    compression: str = "raw"
    planned: bool = False
    text: bool = False
    warmup: int = 3
    steps: int = 10

    @property
    def batch(self) -> int:
        """Sequences in a step."""
        return self.microbatches * self.sequences

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.context

    def gpt_options(self) -> dict[str, Any]:
        """The options of the built-in GPT. Untied, for torch's pipelining has no shared weights."""
        names = ("layers", "width", "heads", "context", "vocabulary")
        return {**{name: getattr(self, name) for name in names}, "dropout": 0.0, "tied": False}

    def job(self) -> dict[str, Any]:
        """The same as a job of Atoll."""
        random = {"random": {"kind": "tokens", "vocabulary": self.vocabulary}}
        return {
            "name": "benchmark",
            "model": {"builtin": "gpt", "options": self.gpt_options()},
            "data": {**({"text": "stdlib"} if self.text else random), "sequence_length": self.context},
            "training": {
                "steps": self.warmup + self.steps,
                "batch": self.batch,
                "microbatch": "auto" if self.planned else self.sequences,
                "optimizer": {"name": "sgd", "learning_rate": self.learning_rate},
            },
            "network": {"compression": self.compression},
            "plan": {} if self.planned else {"stages": self.stages},
        }

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, or what passes for one: ``exec`` are the words before a command that run it there."""

    name: str
    address: str
    exec: tuple[str, ...] = ()


LOOPBACK = Host(name="loopback", address="127.0.0.1")


def hosts_of_environment() -> list[Host]:
    """The hosts in ATOLL_TEST_HOSTS; none when it is not set."""
    entries = json.loads(os.environ.get(HOSTS_VARIABLE, "[]"))
    return [Host(name=entry["name"], address=entry["address"], exec=tuple(entry["exec"])) for entry in entries]


def free_port() -> int:
    """A port that nobody listens on here and now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
