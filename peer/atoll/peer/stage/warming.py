"""Uses once what computing will use, so that a peer which then looks at its free memory has paid for it already.

torch loads code when it is first called: libraries of kernels, symbolic mathematics for shapes, buffers of each thread. That is
tens of megabytes, which would otherwise be taken from what the peer has offered.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.optim.adamw import adamw

_ROWS, _LENGTH, _WIDTH, _HEADS = 2, 32, 64, 2


def warm_up(device: str) -> None:
    """A training step of a model of no use, with the operators that most models have; then their shapes alone."""
    weights = _weights(torch.device(device))
    gradients = torch.autograd.grad(_loss(*weights), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        _update(weight.detach(), gradient)
    with torch.no_grad():
        _loss(*_weights(torch.device("meta")))


def _weights(device: torch.device) -> tuple[torch.Tensor, ...]:
    """A kernel, a table, and the scale of a norm."""
    shapes = ((_WIDTH, 3, 3, 3), (_WIDTH, _WIDTH), (_WIDTH,))
    return tuple(torch.full(shape, 0.1, device=device, requires_grad=True) for shape in shapes)


def _loss(kernel: torch.Tensor, table: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    device = kernel.device
    images = torch.zeros(_ROWS, 3, 8, 8, device=device)
    mean, variance = torch.zeros(_WIDTH, device=device), torch.ones(_WIDTH, device=device)
    features = functional.batch_norm(functional.conv2d(images, kernel, padding=1), mean, variance, training=True).relu()
    tokens = torch.zeros(_ROWS, _LENGTH, dtype=torch.long, device=device)
    hidden = functional.embedding(tokens, table) + features.mean((2, 3)).unsqueeze(1)
    hidden = functional.linear(functional.layer_norm(hidden, (_WIDTH,), scale), table)
    heads = hidden.view(_ROWS, _LENGTH, _HEADS, -1).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    logits = functional.linear(functional.dropout(functional.gelu(mixed), 0.1), table)
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@torch.no_grad()
def _update(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    adamw(
        [weight], [gradient], [first], [second], [], [torch.tensor(0.0)],
        foreach=False, fused=False, amsgrad=False, beta1=0.9, beta2=0.99, lr=0.1, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip
    torch.linalg.vector_norm(weight, dtype=torch.float64 if weight.device.type != "mps" else None)
