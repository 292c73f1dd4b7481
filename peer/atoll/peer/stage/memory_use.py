"""How much memory this process takes now and took at most: of the device that it computes on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import torch

from atoll.peer.stage.allocator import return_memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK_ALONE = "5"


class MemoryUse:
    """For one device: on the CPU the process's resident memory, on CUDA what torch has taken of the device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def now_bytes(self) -> int:
        """What is taken now."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_reserved(self._device))
        if self._device.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """The most that was taken since :meth:`begin_anew`; what is taken now where the system does not tell more."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self._device))
        return max(self.now_bytes(), _resident_peak() if self._device.type == "cpu" else 0)

    def begin_anew(self) -> None:
        """Gives back what nothing holds any more; the peak counts from here. Where the system has no way to forget a peak, it
        stays that of the process's life."""
        give_back(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            with contextlib.suppress(OSError):
                _CLEAR.write_text(_PEAK_ALONE)


def give_back(device: torch.device) -> None:
    """What nothing holds any more goes back to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_memory()


def _resident_peak() -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
