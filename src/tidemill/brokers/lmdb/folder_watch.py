"""Notice, without polling, that a store's folder was moved or deleted.

The kernel reports changes through inotify. While owners sleep, they also poll the descriptor of
inotify. Without inotify, the housekeeping notices a change within 30 seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from tidemill.core.files import raised

_MOVE_SELF, _DELETE_SELF, _DELETE, _MOVED_FROM = 0x800, 0x400, 0x200, 0x40
_GONE = _MOVE_SELF | _DELETE_SELF


class Watch:
    """A watch of a folder and the folders above; ``fds`` has the descriptor to poll, if any."""

    def __init__(self, folder: str) -> None:
        self.fds: list[int] = []
        # Fails when the system has no inotify.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if fd < 0:
                return
            self.fds.append(raised(fd))
            what, path = _GONE | _DELETE | _MOVED_FROM, folder
            while True:
                libc.inotify_add_watch(self.fds[0], os.fsencode(path), what)
                above = os.path.dirname(path)
                if above == path:
                    return
                what, path = _GONE, above

    def drain(self) -> None:
        """Read pending reports off the descriptor."""
        with contextlib.suppress(OSError):
            while self.fds and os.read(self.fds[0], 4096):
                pass

    def close(self) -> None:
        """End the watch."""
        fds, self.fds = self.fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
