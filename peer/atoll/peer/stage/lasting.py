"""Memory for tensors that live as long as a stage: weights, gradients, the optimizer's moments.

What comes and goes with each microbatch shares one heap. A long-lived tensor among it leaves gaps around it that fit nothing.
So on the CPU each long-lived tensor of some size gets a mapping of its own, which also goes back to the system at once when the
stage is given up. Other devices have allocators that keep sizes apart.
"""

from __future__ import annotations

import mmap

import torch

_SMALLEST_BYTES = 64 * 1024  # a mapping is made of whole pages; below this the waste matters more than the gaps


def lasting_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, row-major. Their pages are taken when they are first written."""
    return _with_strides(torch.empty(shape, dtype=dtype, device="meta"), device)


def lasting_zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape, dtype, device and memory layout of ``tensor``."""
    return _with_strides(torch.empty_like(tensor, device="meta"), tensor.device)


def lasting_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor``."""
    return lasting_zeros_like(tensor).copy_(tensor.detach())


def _with_strides(example: torch.Tensor, device: torch.device) -> torch.Tensor:
    num_bytes = example.numel() * example.itemsize
    if device.type != "cpu" or num_bytes < _SMALLEST_BYTES:
        return torch.zeros_like(example, device=device, requires_grad=False)
    plain = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=example.dtype)
    return plain.as_strided(example.shape, example.stride())
