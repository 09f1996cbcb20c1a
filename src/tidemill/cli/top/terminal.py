"""The terminal of ``tidemill top``: a screen of its own, single keys, and frames of lines.

At the end of the block, the terminal gets back its settings, its cursor and its screen. The same
happens after an exception, after TERM, HUP and Ctrl-C, and while Ctrl-Z stops the program. Only
changed lines are written, in one write, so nothing flickers.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # show the alternate screen, hide the cursor, clear
_LEAVE = "\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # synchronized output: a frame appears as a whole
_REST_OF_KEY = 0.05  # seconds after ESC within which the rest of a key arrives, also over ssh

_KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)


class Terminal:
    """A terminal that shows frames of lines; a context manager."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._shown: list[str] = []
        self._stale = True  # True when the screen must be written as a whole
        self._saved: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)

    # -- taking and restoring the terminal ------------------------------------------------------

    def __enter__(self) -> Terminal:
        self._saved = termios.tcgetattr(self._in)
        handlers = {
            **dict.fromkeys((signal.SIGTERM, signal.SIGHUP), self._end),
            signal.SIGWINCH: self._resized,
            signal.SIGTSTP: self._suspend,
        }
        for signum, handler in handlers.items():
            self._handlers[signum] = signal.signal(signum, handler)
        try:
            self._begin()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        """Restore the terminal; signals are ignored meanwhile."""
        self._handlers.setdefault(signal.SIGINT, signal.getsignal(signal.SIGINT))
        for signum in self._handlers:
            signal.signal(signum, signal.SIG_IGN)
        self._leave()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _begin(self) -> None:
        tty.setcbreak(self._in)  # read single keys without echo; Ctrl-C still sends a signal
        self._stale = True
        self._write(_ENTER)

    def _leave(self) -> None:
        try:
            self._write(_LEAVE)
        except OSError:
            pass  # the terminal is gone
        try:
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)
        except termios.error:
            pass

    def _end(self, signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    def _resized(self, signum: int, frame: FrameType | None) -> None:
        self._stale = True
        self.wake()

    def _suspend(self, signum: int, frame: FrameType | None) -> None:
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # the call ends when the shell continues this program
        signal.signal(signal.SIGTSTP, self._suspend)
        self._begin()
        self.wake()

    # -- keys and frames ------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            size = shutil.get_terminal_size()
        return max(20, size.columns), max(6, size.lines)

    def wake(self) -> None:
        """Make :meth:`keys` return. Every thread and signal handler may call this."""
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # the pipe is full, so :meth:`keys` will return

    def keys(self, timeout: float | None) -> list[str]:
        """The keys that were pressed; waits for a key, a wake-up or the timeout in seconds."""
        ready, _, _ = select.select([self._in, self._wake_read], [], [], timeout)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._in not in ready:
            return []
        data = os.read(self._in, 1024)
        if not data:
            raise SystemExit(0)  # the terminal is closed
        while data.endswith((b"\x1b", b"\x1b[", b"\x1bO")):
            if not select.select([self._in], [], [], _REST_OF_KEY)[0]:
                break
            data += os.read(self._in, 1024)
        return _split(data.decode(errors="replace"))

    def show(self, lines: Sequence[str], size: tuple[int, int]) -> None:
        """Show a frame made for a terminal of this size. A frame of an outdated size is skipped."""
        stale, self._stale = self._stale, False  # reset first: a signal may set it again
        if size != self.size:
            self._stale = True
            self.wake()
            return
        rows = size[1]
        new = [*lines[:rows], *[""] * (rows - len(lines))]
        keeps = not stale and len(self._shown) == rows
        parts = [
            f"\x1b[{n + 1};1H{line}\x1b[0m\x1b[K"
            for n, line in enumerate(new)
            if not keeps or line != self._shown[n]
        ]
        if parts:
            self._write(f"{_BEGIN}{''.join(parts)}{_END}")
        self._shown = new

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "ascii", "replace")
        while data:
            data = data[os.write(self._out, data) :]


def _split(text: str) -> list[str]:
    """The keys in the text of a terminal, by their names; keys without a name stay as they are."""
    keys = [found.group() for found in _KEY.finditer(text)]
    return [_KEYS.get(key, key) for key in keys]
