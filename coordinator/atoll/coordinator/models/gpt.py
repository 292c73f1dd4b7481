"""The built-in GPT: a pre-norm decoder with learned positions, its loss included."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_DEVIATION = 0.02


class Attention(nn.Module):
    """Causal self-attention over ``heads`` heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        joined = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = joined.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, length, width / heads]
        probability = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(functional.gelu(self.expand(hidden)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only language model; ``forward`` returns the mean cross entropy, :meth:`logits` what it predicts."""

    def __init__(
        self,
        layers: int = 8,
        width: int = 192,
        heads: int = 6,
        context: int = 256,
        vocabulary: int = 256,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token_embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Small normal weights, zero biases; what writes to the residual stream is scaled down by its number of writers."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_to_residual = name.endswith(".output")
                deviation = INITIAL_DEVIATION / math.sqrt(2 * layers) if writes_to_residual else INITIAL_DEVIATION
                nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each position: [batch, length] to [batch, length, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
