"""Measure the memory that a worker process uses; see ``--max-memory``."""

from __future__ import annotations

import os
import sys


def resident_memory() -> int:
    """Resident memory of this process in bytes; without ``/proc`` its peak so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
