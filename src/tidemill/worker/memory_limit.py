"""How much memory a worker process has come to use; see ``--max-memory``."""

from __future__ import annotations

import os
import sys

__all__ = ["resident_memory"]


def resident_memory() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
