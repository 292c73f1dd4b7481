"""A model factory for tests: an encoder-decoder whose memory skips from the encoder's end to every decoder block, whose first
features skip to the head (as in a U-Net), and whose embedding is used three times."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor, causal: bool) -> torch.Tensor:
        key, value = self.key_value(memory).chunk(2, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(hidden), key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, cross: bool) -> None:
        super().__init__()
        self.causal = cross
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads) if cross else None
        self.feed_forward = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(inplace=True))
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, self.causal))
        if self.cross is not None:
            assert memory is not None
            hidden = hidden + self.cross(hidden, memory, False)
        update: torch.Tensor = self.dropout(self.down(self.feed_forward(hidden)))
        return hidden + update


class EncoderDecoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Block(width, heads, dropout, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, heads, dropout, True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        features = memory = self.embedding(tokens)
        for block in self.encoder:
            memory = block(memory)
        shifted = functional.pad(targets[:, :-1].clamp(min=0), (1, 0))
        hidden = self.embedding(shifted)
        for block in self.decoder:
            hidden = block(hidden, memory)
        logits = self.head(hidden + features)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(width: int = 32, heads: int = 2, layers: int = 2, vocabulary: int = 64, dropout: float = 0.0) -> EncoderDecoder:
    """The model, with its loss."""
    return EncoderDecoder(width, heads, layers, vocabulary, dropout)
