"""A program in a terminal of its own, and the screen that a person would see there."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from typing import Any

from harness import eventually

_PART = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|([^\x1b]+)|\x1b", re.DOTALL)
_BEGUN = re.compile(r"\x1b(?:\[[?0-9;]*)?$")


class Screen:
    """``python …`` in a pseudo terminal of some columns and rows.

    It understands the sequences that ``top`` writes: go to the start of the screen, the start and
    end of a frame, the cursor, and the second screen.
    """

    def __init__(self, words: Sequence[str], columns: int = 100, rows: int = 30) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.before = termios.tcgetattr(self.slave)
        self.lines: dict[int, str] = {}
        self.said = ""  # everything that was written
        self.second = False  # the second screen is shown
        self.cursor = True  # the cursor is visible
        self._row = 1
        self._frame_before: dict[int, str] | None = None  # while a frame is being drawn
        self._rest = ""  # the beginning of a sequence
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._set_size(columns, rows)
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=env,
            start_new_session=True,
        )

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a window does, and tell the program."""
        self.lines.clear()
        self._set_size(columns, rows)
        os.kill(self.process.pid, signal.SIGWINCH)

    def press(self, keys: str) -> None:
        """Type some keys."""
        os.write(self.master, keys.encode())

    @property
    def text(self) -> str:
        """The screen after the latest whole frame."""
        self._read()
        lines = self.lines if self._frame_before is None else self._frame_before
        rows = range(1, max(lines, default=0) + 1)
        return "\n".join(lines.get(row, "").rstrip() for row in rows)

    def shows(self, text: str) -> str:
        """Wait until the screen shows a text; the screen then."""

        def screen() -> str:
            return shown if text in (shown := self.text) else ""

        try:
            return eventually(screen, f"the screen shows {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows:\n{self.text}") from None

    def lacks(self, text: str) -> None:
        """Wait until the screen shows a text no more."""
        eventually(lambda: text not in self.text, f"the screen shows no {text!r}")

    def ended(self) -> int:
        """Wait for the end of the program; its exit code."""

        def over() -> bool:
            self._read()
            return self.process.poll() is not None

        eventually(over, "the program ends")
        self._read()
        return self.process.returncode

    def is_given_back(self) -> bool:
        """True when the terminal is as it was before the program."""
        self._read()
        after: list[Any] = termios.tcgetattr(self.slave)
        return after == self.before and not self.second and self.cursor

    def close(self) -> None:
        """End the program, and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self.master)
        os.close(self.slave)

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self._take(self._decode(data))
        except BlockingIOError:
            pass

    def _take(self, text: str) -> None:
        self.said += text
        text = self._rest + text
        self._rest = cut[0] if (cut := _BEGUN.search(text)) else ""
        text = text[: len(text) - len(self._rest)]
        for mark, numbers, letter, plain in _PART.findall(text):
            if plain:
                first, *more = plain.replace("\r", "").split("\n")
                self.lines[self._row] = self.lines.get(self._row, "") + first
                for line in more:
                    self._row += 1
                    self.lines[self._row] = line
            elif mark and numbers == "1049":
                self.second = letter == "h"
            elif mark and numbers == "2026":
                self._frame_before = dict(self.lines) if letter == "h" else None
            elif mark and numbers == "25":
                self.cursor = letter == "h"
            elif letter == "H":
                self._row = 1
                self.lines.clear()  # a frame has all rows
