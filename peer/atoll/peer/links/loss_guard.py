"""What codecs do to the loss, estimated on samples while training goes on.

Theory. A stage sends activations x, its neighbour computes with x - d. When the gradient g of the loss comes back for the same
microbatch, two sums over its elements tell what d did:

- *slope*: g.d. The gradient is that at x - d, so the mean of -g.d is twice what d added to the loss where it is not biased (a
  first-order term of zero, and a gradient that has grown by d's curvature), and never less than what it added. It is exact, but
  the smaller the damage the more of it is noise.
- *curvature*: the sum over samples of (g.d)^2. For a loss that is the logarithm of a likelihood the mean of g g^T is its
  curvature (Fisher's information), so half of it, on the right scale, is what errors of this kind add, in whatever directions.
  It has little noise, but is too large where the damage is.

The squared error alone knows nothing of directions, and some matter a thousand times more than others.

Gradients that are sent back only steer the descent: their error and their bias (how much too short they arrive) say enough.

It costs a decoding, a copy of one message and two products, on one microbatch in several steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.compression.context import Direction, direction
from atoll.compression.registry import MessageCoder
from atoll.peer.links.usage import Usage, UsageTable
from atoll.protocol.ids import PeerId, StepNumber
from atoll.protocol.messages import EncodedMessage, Kind, Message, MessageKey

SAMPLED_STEPS = 4
"""One microbatch in so many steps is looked at."""


@dataclass(slots=True)
class _Pending:
    """The errors of an activation whose gradient is still to come, by the value's name."""

    key: MessageKey
    codec: str
    errors: dict[str, Tensor]


class LossGuard:
    """One sample at a time for each neighbour. Used on the thread that encodes and decodes, but for :meth:`awaits`."""

    def __init__(self) -> None:
        self._pending: dict[PeerId, _Pending] = {}
        self._sampled: dict[tuple[PeerId, Direction], tuple[StepNumber, str]] = {}

    def sent(self, peer: PeerId, coder: MessageCoder, message: Message, encoded: EncodedMessage, usage: Usage) -> None:
        """A message that may have lost bits was encoded."""
        key = message.key
        if key.evaluation or not self._is_due(peer, key, usage.codec):
            return
        errors: dict[str, Tensor] = {}
        lost = total = along = 0.0
        for name, original, decoded in coder.lossy(message, encoded):
            wanted = original.detach().to(decoded.device, torch.float32)
            error = (wanted - decoded.float()).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            wanted = wanted.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            lost, total = lost + _dot(error, error), total + _dot(wanted, wanted)
            along += _dot(error, wanted)
            errors[name] = error
        if total > 0.0:
            usage.relative_error = (lost / total) ** 0.5
        if key.kind is Kind.GRADIENT:
            if total > 0.0:
                usage.guard(bias=along / total)
            return
        self._pending.pop(peer, None)
        if errors:
            self._pending[peer] = _Pending(key=key, codec=usage.codec, errors=errors)

    def awaits(self, peer: PeerId, key: MessageKey) -> bool:
        """Whether this is the gradient of the sample; asked from any thread."""
        pending = self._pending.get(peer)
        return pending is not None and _is_answer(key, pending.key)

    def received(self, peer: PeerId, message: Message, table: UsageTable) -> None:
        """A message was decoded; ``table`` has what is known of the links to its sender."""
        pending = self._pending.get(peer)
        if pending is None or not _is_answer(message.key, pending.key):
            return
        del self._pending[peer]
        usage = table.of(peer, Kind.ACTIVATION)
        found = [(gradient, pending.errors[name]) for name, gradient in message.tensors if name in pending.errors]
        if found and usage.codec == pending.codec:
            usage.guard(slope=sum(_dot(*pair) for pair in found), curvature=_curvature(found))

    def _is_due(self, peer: PeerId, key: MessageKey, codec: str) -> bool:
        place = peer, direction(key.kind)
        step, earlier = self._sampled.get(place, (StepNumber(-SAMPLED_STEPS), codec))
        if key.step < step + SAMPLED_STEPS and codec == earlier:
            return False
        self._sampled[place] = key.step, codec
        return True


def _is_answer(key: MessageKey, sent: MessageKey) -> bool:
    """Whether ``key`` is the gradient of the activation ``sent``."""
    same = (key.generation, key.step, key.microbatch) == (sent.generation, sent.step, sent.microbatch)
    return same and key.kind is Kind.GRADIENT and (key.source, key.target) == (sent.target, sent.source)


def _dot(one: Tensor, other: Tensor) -> float:
    product = torch.dot(one.reshape(-1).float(), other.reshape(-1).float().to(one.device))
    return float(product) if bool(product.isfinite()) else 0.0


def _curvature(found: list[tuple[Tensor, Tensor]]) -> float:
    """Samples are what the first dimension counts; all values of a sample change its loss together."""
    by_sample: dict[int, Tensor] = {}
    for gradient, error in found:
        rows = gradient.shape[0] if gradient.dim() > 1 else 1
        products = (gradient.reshape(rows, -1).double() * error.reshape(rows, -1)).sum(1)
        by_sample[rows] = by_sample[rows] + products if rows in by_sample else products
    total = sum(float(products.square().sum()) for products in by_sample.values())
    return total if total < float("inf") else 0.0
