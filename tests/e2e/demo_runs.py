"""For the tests of the demo: a small folder, and the real demo on it."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE = 90.0
FILES = 120


def make_folder(tmp_path: Path) -> Path:
    """Text files, three alike, an image, and some of what must be left out."""
    folder = tmp_path / "files"
    for hidden in (".git", ".venv", "node_modules"):
        (folder / hidden).mkdir(parents=True)
        (folder / hidden / "inside.txt").write_text("no\n")
    for n in range(FILES):
        (folder / f"f{n:03}.txt").write_text(f"file {n}\nhas two lines\n")
    for n in range(3):
        (folder / f"alike{n}.txt").write_text("all the same\n")
    (folder / "an odd\tname.txt").write_text("odd\n")
    (folder / "picture.png").write_bytes(png(30, 20))
    (folder / "link.txt").symlink_to("f000.txt")
    return folder


def png(width: int, height: int) -> bytes:
    """The beginning of a PNG."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + b"\n"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The real demo, leading a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tidemill", "demo", ".", "--json", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(demo: subprocess.Popen[str]) -> dict[str, Any]:
    """Its report, once it has ended well."""
    try:
        out, err = demo.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(demo.pid, signal.SIGKILL)
        raise
    assert demo.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report
