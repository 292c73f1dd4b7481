"""Tensors between the host, where messages are made, and the device that computes.

On CUDA, copies go through pinned memory on a stream of their own, one a direction, so that they overlap with what the device
computes; only the kernels that need a value wait for it. On the CPU nothing is copied.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Staging(Protocol):
    """Moves tensors to and from one device."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of the host on the device, ready for kernels that are started after this call."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of the device on the host, complete when this returns."""
        ...


def staging_for(device: torch.device) -> Staging:
    """The way to move tensors to and from ``device``."""
    if device.type == "cpu":
        return _Host()
    if device.type == "cuda":
        return _Cuda(device)
    return _Direct(device)


def resident_staging() -> Staging:
    """For values that are made on the device and stay there."""
    return _Host()


class _Host:
    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


class _Direct:
    """Plain blocking copies, for devices without pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu")


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inbound = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outbound = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        # The caching host allocator gives a pinned block out again only after the copy that uses it is done. Copies keep the
        # memory layout, on which the last bits of a result may depend.
        pinned = tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._inbound):
            moved = pinned.to(self._device, non_blocking=True)
        computing.wait_stream(self._inbound)
        # Made on the copying stream, used on the computing one: its memory must not be given out while that still reads it.
        moved.record_stream(computing)
        return moved

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        landing = torch.empty_like(source, device="cpu", pin_memory=True)
        self._outbound.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outbound):
            landing.copy_(source, non_blocking=True)
            source.record_stream(self._outbound)
            done = self._outbound.record_event()
        done.synchronize()
        return landing
