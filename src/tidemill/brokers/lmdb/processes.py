"""Other processes of this machine, as error messages name them."""

from __future__ import annotations

import os

_STOPPED = ("T", "t")


def process_of(thread: int, file: str) -> int:
    """The process of a thread that has a file mapped; 0 when no such process can be seen.

    A thread id from another container may belong to an unrelated process of this container.
    """
    pid = 0
    try:
        pid = int(_status(thread)["Tgid"])
        inode = str(os.stat(file).st_ino)
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return pid if any(line.split(maxsplit=5)[4] == inode for line in maps) else 0
    except PermissionError:  # a process of another user: only its id is known
        return pid
    except (OSError, KeyError, ValueError, IndexError):
        return 0


def described(pid: int) -> str:
    """Name a process, with its state and a remedy."""
    if not pid:
        return (
            "by a process that cannot be seen from here, perhaps in another container; "
            "or this machine is very busy"
        )
    if pid == os.getpid():
        return (
            "by this process itself, for a large batch or for a transaction of your own; inside "
            "your own transaction pass it as txn="
        )
    holder = f"by {named(pid)}"
    try:
        state = _status(pid)["State"][:1]
    except (OSError, KeyError):
        return holder
    if state in _STOPPED:
        return f"{holder}, which is stopped; let it go on with kill -CONT {pid}, or end it"
    return holder


def named(pid: int) -> str:
    """A process with its number and the beginning of its command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(500).decode("utf-8", "replace").replace("\0", " ").split()
    except OSError:
        words = []
    name = "".join(c for c in " ".join(words) if c.isprintable())
    return f"process {pid} ({name[:80]})" if name else f"process {pid}"


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        rows = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in rows}
