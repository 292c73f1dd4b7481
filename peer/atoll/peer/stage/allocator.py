"""How this process's C library hands out memory, set for tensors: large, of few sizes, allocated anew for each microbatch.

What glibc does by default, and what is done about it; other C libraries are left as they are:

- It gives each thread a heap of its own, so that what one thread frees another cannot use. Here there is one heap.
- It returns large blocks to the system at once, so that every microbatch pays for fresh pages. Here the heap keeps what is
  freed, and blocks come from it; but very large ones leave gaps in a heap that fit nothing. Where the system has huge pages,
  fresh pages cost next to nothing, and those blocks come from the system.
- It keeps small freed blocks aside, and among them the edges that it cuts off each aligned block. When the block is freed its
  edges are missing, the gap is too small for the next one of its size, and the heap grows by a tenth. Here it keeps nothing
  aside.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_THRESHOLD_BYTES = 32 * 2**20  # glibc takes no more
_THRESHOLD_WITH_HUGE_PAGES_BYTES = 8 * 2**20  # several huge pages, so that little of the block lies on small ones
_KEPT_BYTES = 256 * 2**20
_TUNABLES = "GLIBC_TUNABLES"
_NOTHING_KEPT_ASIDE = "glibc.malloc.tcache_count=0"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_BEGUN_ANEW = "ATOLL_PEER_ALLOCATOR"  # set once, so that a process whose wishes are not heard does not begin anew for ever


def begin_anew_if_need_be() -> None:
    """Runs this process's program again, under the same number, with what glibc reads only when a program begins.

    To be called before anything was started or opened. A user who has set glibc's tunables is left alone.
    """
    if _is_glibc() and sys.executable and _TUNABLES not in os.environ and _BEGUN_ANEW not in os.environ:
        wishes = [_NOTHING_KEPT_ASIDE, _HUGE_PAGES] if _has_huge_pages() else [_NOTHING_KEPT_ASIDE]
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _TUNABLES: ":".join(wishes), _BEGUN_ANEW: "1"})


def keep_memory_for_tensors() -> None:
    """One heap for all threads, which keeps what is freed and gives all but very large blocks. Call it at the start."""
    if _is_glibc():
        huge = _HUGE_PAGES in os.environ.get(_TUNABLES, "")
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_WITH_HUGE_PAGES_BYTES if huge else _LARGEST_THRESHOLD_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_memory() -> None:
    """Gives the system what nothing holds any more; to be called when much was let go of, for example a stage."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def _has_huge_pages() -> bool:
    """Whether a program may ask for them."""
    try:
        return "[never]" not in _HUGE_PAGES_SETTING.read_text()
    except OSError:
        return False
