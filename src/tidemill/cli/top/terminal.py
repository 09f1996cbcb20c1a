"""The terminal of ``tidemill top``: rich's live screen, single keys without echo, and signals.

At the end, the terminal gets back its settings, its cursor and its screen. The same happens after
an exception, after TERM, HUP and Ctrl-C, and while Ctrl-Z stops the program.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import sys
import termios
import tty

from rich.console import Console, RenderableType
from rich.live import Live

_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # synchronized output: a frame appears as a whole
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
_NAMES = {"\x1b[A": "k", "\x1bOA": "k", "\x1b[B": "j", "\x1bOB": "j", "\r": "\n"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Terminal:
    """A terminal that shows one renderable of rich, and reads keys.

    A signal only writes its number into a pipe. :meth:`read_keys` acts on it, so no signal
    interrupts a frame or the end.
    """

    def __init__(self, shown: RenderableType) -> None:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(errors="replace")  # not every terminal has all characters
        out = Console(force_terminal=True, force_interactive=True, highlight=False)
        self._live = Live(
            shown,
            console=out,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._in = sys.stdin.fileno()
        self._saved = termios.tcgetattr(self._in)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._handlers = {s: signal.signal(s, lambda signum, frame: None) for s in _SIGNALS}

    def begin(self) -> None:
        """Take the terminal."""
        tty.setcbreak(self._in)  # read single keys without echo; Ctrl-C still sends a signal
        self._live.start()

    def end(self) -> None:
        """Give the terminal back."""
        self._leave()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._live.stop()
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)

    def show(self) -> None:
        """Draw a frame in the present size of the terminal."""
        sys.stdout.write(_BEGIN)
        self._live.refresh()
        sys.stdout.write(_END)
        sys.stdout.flush()

    def wake(self) -> None:
        """Make :meth:`read_keys` return. Every thread may call this."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it will return
            os.write(self._wake, b"\0")

    def read_keys(self) -> list[str]:
        """The keys that were pressed; waits for a key, a wake-up or a signal.

        An arrow is j or k, and Enter is a line feed.
        """
        ready, _, _ = select.select([self._in, self._woken], [], [])
        signals = os.read(self._woken, 4096) if self._woken in ready else b""
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signum in signals:
                raise SystemExit(128 + signum)
        if signal.SIGINT in signals:
            return ["q"]
        if signal.SIGTSTP in signals:
            self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)  # ends when the shell continues this program
            self.begin()
        if self._in not in ready:
            return []
        data = os.read(self._in, 1024)  # the bytes of one key arrive together
        if not data:
            raise SystemExit(0)  # the terminal is closed
        keys = _KEY.findall(data.decode(errors="replace"))
        return [str(_NAMES.get(key, key)) for key in keys]
