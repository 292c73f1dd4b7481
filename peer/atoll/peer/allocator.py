"""How this process's C library hands out memory, set for tensors: large, of few sizes, allocated anew for each microbatch.

glibc by default gives each thread a heap of its own, so that what one thread frees another cannot use, and returns large blocks
to the system at once, so that every microbatch pays for fresh pages. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_THRESHOLD_BYTES = 32 * 2**20  # glibc takes no more
_KEPT_BYTES = 256 * 2**20


def return_memory() -> None:
    """Gives what is free in the heap back to the system."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_memory_for_tensors() -> None:
    """One heap for all threads, from which blocks of up to 32 MiB come and which keeps what is freed. Call it at the start."""
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(_M_ARENA_MAX, 1)
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
    library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
