"""Lines that can be cut without notice: within this machine, and to others."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import threading
from pathlib import Path

from .base import free_port, program


class Proxy:
    """A line to a server of this machine that can be cut: nothing goes through, nobody is told."""

    def __init__(self, port: int, own: int = 0) -> None:
        self._target = port
        self._open = threading.Event()
        self._open.set()
        self._over = False
        self._listener = socket.create_server(("127.0.0.1", own))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """From now on bytes are held up."""
        self._open.clear()

    def mend(self) -> None:
        """They go on, those held up first."""
        self._open.set()

    def lead_to(self, port: int) -> None:
        """From now on new connections go to another server."""
        self._target = port

    def close(self) -> None:
        """Hang up everything."""
        self._over = True
        self._open.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # who accepts would keep it open
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server is down: hang up, and go on
                near.close()
                continue
            self._sockets = [sock for sock in self._sockets if sock.fileno() >= 0]
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            if not self._over:
                self._open.wait()
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # else the other thread keeps it open
                sock.close()


class Machine:
    """Another machine: a network namespace with a line of its own to this one, which can be cut.

    It has a host name and a folder for temporary files, too.

    Attributes:
        host: this machine, as seen from there.
        under: what to put before a command that is to run there.
        env: what to add to the environment of such a command.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._space = f"tidemill-{name}-{os.getpid()}"
        self._link = f"tm{secrets.token_hex(4)}"
        number = free_port()  # which is this process's alone: so is the subnet
        subnet = f"10.{64 + number // 256}.{number % 256}"
        self.host = f"{subnet}.1"
        ip("netns", "add", self._space)
        atexit.register(self.close)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        ip("addr", "add", f"{self.host}/30", "dev", self._link)
        ip("link", "set", self._link, "up")
        ip("-n", self._space, "addr", "add", f"{subnet}.2/30", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", self._space, "link", "set", device, "up")
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        self.under = [program("ip", "iproute2"), "netns", "exec", self._space, *named]
        folder.mkdir()
        self.env = {"TMPDIR": str(folder)}

    def cut(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        ip("link", "set", self._link, "down")

    def mend(self) -> None:
        """The line is there again."""
        ip("link", "set", self._link, "up")

    def close(self) -> None:
        """Forget it. What runs there is ended first."""
        for command in (["link", "del", self._link], ["netns", "del", self._space]):
            subprocess.run(["ip", *command], capture_output=True, check=False)


def ip(*command: str) -> None:
    """Change something in the network of this machine, or of one that was made here."""
    subprocess.run([program("ip", "iproute2"), *command], check=True, capture_output=True)


def may_have_machines() -> bool:
    """Whether this user may make network namespaces."""
    made = f"tidemill-try-{os.getpid()}"
    command = [program("ip", "iproute2"), "netns", "add", made]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    ip("netns", "del", made)
    return True
