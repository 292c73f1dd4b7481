"""How many connections a process can bear before the system refuses it files."""

from __future__ import annotations

import contextlib
import sys

WANTED = 65_536
"""Far more than a run has connections; strangers who open many and say nothing must not keep those away who belong."""


def allow_many_connections() -> int:
    """Raises this process's own limit of open files as far as the system lets it; what the limit is now."""
    if sys.platform == "win32":  # there is no such limit
        return WANTED
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
