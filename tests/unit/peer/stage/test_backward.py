"""The two halves of a backward pass give, bit for bit, what one pass gives, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from atoll.peer.stage.backward import backward

Case = tuple[Callable[..., Tensor], tuple[int, ...], tuple[tuple[int, ...], ...]]

IDS = torch.arange(6).view(2, 3) % 5


def _linear_in_place(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The result of a three-dimensional linear layer is a view, whose history the in-place activation rewrites.
    return torch.relu_(functional.linear(x, weight, bias))


def _add_to_a_view(x: Tensor, bias: Tensor) -> Tensor:
    doubled = x * 2
    doubled[:, :2].add_(bias)
    return doubled.sin()


def _normalised_weight(x: Tensor, direction: Tensor, length: Tensor) -> Tensor:
    return functional.linear(x, direction * (length / direction.norm(dim=1, keepdim=True)))


def _twice(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(torch.tanh(functional.linear(x, weight)), weight)


def _attention(x: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
    q, k, v = (functional.linear(x, weight).view(2, 6, 2, 4).transpose(1, 2) for weight in (query, key, value))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + functional.linear(mixed.transpose(1, 2).reshape(2, 6, 8), out)


def _recurrent(x: Tensor, *weights: Tensor) -> Tensor:
    start = torch.zeros(1, 2, 4)
    output: Tensor = torch.ops.aten.lstm.input(x, [start, start], list(weights), True, 1, 0.0, True, False, True)[0]
    return output


CASES: dict[str, Case] = {
    "linear": (functional.linear, (2, 3, 8), ((4, 8), (4,))),
    "linear of a matrix": (functional.linear, (3, 8), ((4, 8), (4,))),
    "linear in place": (_linear_in_place, (2, 3, 8), ((4, 8), (4,))),
    "two layers": (
        lambda x, a, b, c: functional.linear(functional.gelu(functional.linear(x, a, b)), c),
        (2, 3, 8),
        ((16, 8), (16,), (8, 16)),
    ),
    "matmul": (lambda x, weight: x @ weight, (2, 3, 8), ((8, 4),)),
    "embedding": (lambda x, table: x + functional.embedding(IDS, table), (2, 3, 8), ((5, 8),)),
    "layer norm": (lambda x, weight, bias: functional.layer_norm(x, (8,), weight, bias), (2, 3, 8), ((8,), (8,))),
    "rms norm": (lambda x, weight: functional.rms_norm(x, (8,), weight), (2, 3, 8), ((8,),)),
    "group norm": (lambda x, weight, bias: functional.group_norm(x, 2, weight, bias), (2, 4, 5, 5), ((4,), (4,))),
    "batch norm": (
        lambda x, weight, bias: functional.batch_norm(x, None, None, weight, bias, training=True),
        (3, 4, 5, 5),
        ((4,), (4,)),
    ),
    "convolution": (lambda x, k, b: functional.conv2d(x, k, b, padding=1), (2, 3, 6, 6), ((4, 3, 3, 3), (4,))),
    "depthwise": (lambda x, k: functional.conv2d(x, k, groups=4), (2, 4, 6, 6), ((4, 1, 3, 3),)),
    "transposed": (lambda x, k, b: functional.conv_transpose2d(x, k, b, 2), (2, 3, 4, 4), ((3, 4, 2, 2), (4,))),
    "attention": (_attention, (2, 6, 8), ((8, 8), (8, 8), (8, 8), (8, 8))),
    "prelu": (functional.prelu, (2, 4, 5), ((4,),)),
    "bilinear": (lambda x, weight: functional.bilinear(x, x * 2, weight), (3, 4), ((5, 4, 4),)),
    "normalised weight": (_normalised_weight, (3, 8), ((4, 8), (4, 1))),
    "weight twice": (_twice, (3, 8), ((8, 8),)),
    "view in place": (_add_to_a_view, (3, 8), ((2,),)),
    "recurrent": (_recurrent, (2, 5, 3), ((16, 3), (16, 4), (16,), (16,))),
    "parameters alone": (lambda x, bias: x * 2 + (bias * bias).sum(), (3, 8), ((8,),)),
    "scale and bias": (lambda x, scale, bias: x * scale + bias + x, (3, 8), ((8,), (8,))),
}
AT_ONCE = {
    "weight twice",
    "layer norm",
    "rms norm",
    "group norm",
    "batch norm",
    "prelu",
    "view in place",
    "parameters alone",
    "scale and bias",
}
"""Nothing is put off: there is no matrix, or it is reached on several ways."""


def leaves(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in case[2]]


def received(case: Case, microbatch: int) -> Tensor:
    return torch.randn(case[1], generator=torch.Generator().manual_seed(10 + microbatch)).requires_grad_()


def incoming(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(99))


def assert_equal(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_two_halves_equal_one_pass(name: str) -> None:
    case = CASES[name]
    whole, halved = leaves(case), leaves(case)
    for microbatch in range(3):
        x = received(case, microbatch)
        output = case[0](x, *whole)
        torch.autograd.backward([output], [incoming(output)])
        again = received(case, microbatch)
        output = case[0](again, *halved)
        (gradient,), deferred = backward([get_gradient_edge(output)], [incoming(output)], [again])
        assert again.grad is None
        assert bool(deferred) == (name not in AT_ONCE)
        if microbatch == 0 and deferred:
            assert all(leaf.grad is None for leaf in halved)
        for work in deferred:
            work.run()
        assert_equal([x.grad], [gradient])
    assert_equal([leaf.grad for leaf in whole], [leaf.grad for leaf in halved])
    # Norms are sums over memory, so the layout matters too.
    assert all(leaf.grad is not None and leaf.grad.stride() == leaf.stride() for leaf in halved)


def test_a_received_value_that_is_sent_on_gets_both_gradients() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    output = x * weight
    edges = [get_gradient_edge(x), get_gradient_edge(output)]
    (gradient,), deferred = backward(edges, [torch.tensor([10.0, 20.0]), torch.ones(2)], [x])
    for work in deferred:
        work.run()
    assert gradient is not None
    assert gradient.tolist() == [13.0, 24.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 2.0]


def test_a_value_that_nothing_depends_on_has_no_gradient() -> None:
    x, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (first, second), _ = backward([get_gradient_edge(x.sin())], [torch.ones(2)], [x, unused])
    assert first is not None
    assert second is None
    assert backward([], [], [x]) == ((None,), ())


def test_without_received_values_everything_is_done_at_once() -> None:
    weight = torch.ones(3, requires_grad=True)
    found, deferred = backward([get_gradient_edge(weight * 2)], [torch.ones(3)], [])
    assert (found, deferred) == ((), ())
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
