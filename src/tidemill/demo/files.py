"""The files that the demo measures, and the ids of their jobs."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

_SKIPPED = {"node_modules", "venv", "__pycache__"}
_NAME_MOST = 150


def find_files(folder: Path, home: Path) -> tuple[dict[str, str], int]:
    """({job id: absolute path} of the regular files below a folder, number of files left out).

    Hidden folders, ``node_modules`` and the like, symbolic links and the demo's own ``home`` are
    skipped, and not counted. Files that vanish and names that are not UTF-8 count as left out.
    """
    found: dict[str, str] = {}
    left_out = 0
    root, own = os.path.abspath(folder), os.path.abspath(home)
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED
            and not name.startswith(".")
            and os.path.join(parent, name) != own
        )
        for name in sorted(names):
            path = os.path.join(parent, name)
            try:
                path.encode()
                status = os.lstat(path)
            except (OSError, UnicodeEncodeError):
                left_out += 1
                continue
            if stat.S_ISREG(status.st_mode):
                found[job_id(root, path, status)] = path
    return found, left_out


def job_id(root: str, path: str, status: os.stat_result) -> str:
    """A readable id from the file's path, size and time of change: a changed file is a new job."""
    version = f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    mark = hashlib.blake2s(version, digest_size=6).hexdigest()
    name = os.path.relpath(path, root)
    if not name.isprintable() or len(name.encode()) > _NAME_MOST:
        name = "file"
    return f"{name}@{mark}"
