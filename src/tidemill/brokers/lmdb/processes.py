"""Other processes of this machine, as error messages name them."""

from __future__ import annotations

_STOPPED = ("T", "t")


def described(pid: int) -> str:
    """Name a process, with its state and a remedy."""
    if not pid:
        return (
            "by another process that cannot be seen from here, perhaps in another container; "
            "or this machine is very busy"
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
