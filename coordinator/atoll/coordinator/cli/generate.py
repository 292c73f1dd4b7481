"""A sample of text from trained weights: the quickest look at what a language model learnt.

Only where the job says how tokens become text. The whole model is built here, so callers ask first whether it is small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll.coordinator.tracing.source import open_source
from atoll.protocol.job import Job

LENGTH = 200
TEMPERATURE = 0.8

Scores = Callable[[Tensor], Tensor]
"""From tokens [1, length] to the scores of what follows each: [1, length, vocabulary]."""


class Vocabulary(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteVocabulary:
    """Each byte of UTF-8 is a token."""

    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FileVocabulary:
    """The tokens of a ``tokenizer.json``."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(path)

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


def sample(job: Job, weights: Path, *, prompt: str = "\n", length: int = LENGTH) -> str | None:
    """Up to ``length`` tokens that the model of ``job`` writes after ``prompt``, the same for the same weights.

    None when the job trains no language model on text, or one that has no method ``logits(tokens)``.
    """
    if job.data.text is None:
        return None
    source = open_source(job.model)
    module = source.build_real().eval()
    scores: Scores | None = getattr(module, "logits", None)
    if scores is None:
        return None
    source.state_module(module).load_state_dict(load_file(weights))
    vocabulary: Vocabulary = ByteVocabulary() if job.data.tokenizer == "bytes" else FileVocabulary(job.data.tokenizer)
    generator = torch.Generator().manual_seed(job.training.seed)
    tokens = continue_tokens(scores, vocabulary.encode(prompt) or [0], length, job.data.sequence_length, generator)
    return printable(vocabulary.decode(tokens))


@torch.no_grad()
def continue_tokens(
    scores: Scores, prompt: Sequence[int], length: int, context: int, generator: torch.Generator
) -> Sequence[int]:
    """``length`` tokens after ``prompt``, each drawn by its probability given the last ``context`` tokens.

    On one thread: a token is little work, and on a busy machine threads that wait for one another take many times as long.
    """
    torch.set_num_threads(1)
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        last = scores(tokens[:, -context:])[0, -1]
        probabilities = torch.softmax(last.float() / TEMPERATURE, dim=0)
        following = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, following[None]], dim=1)
    drawn: list[int] = tokens[0, len(prompt) :].tolist()
    return drawn


def printable(text: str) -> str:
    """``text`` without what would upset a terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}" for character in text
    )
