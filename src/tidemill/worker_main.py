"""Run a spawned worker process: set up, load the app, serve (:mod:`tidemill.worker.child`)."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys

from tidemill.app import Tidemill
from tidemill.app_loader import load_app
from tidemill.core.errors import InvalidOption
from tidemill.worker.child import Child
from tidemill.worker.child_protocol import Closed, Down, Hello, MessageSocket, Setup, Up
from tidemill.worker.forked_children import handle_signal
from tidemill.worker.verdicts import describe


def main(fd: int) -> int:
    """Serve the supervisor at the other end of the socket ``fd``; the exit code."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # a program that a task starts must not keep the line open
    message_socket: MessageSocket[Up, Down] = MessageSocket(sock, Down)
    _die_with_parent()
    try:
        setup = _receive_setup(message_socket)
        # Open for life: faulthandler writes to it, from C, whoever holds the interpreter lock. The
        # thread that has the signal writes its own stack: to walk the others would be a crash.
        stacks = open(setup.stacks, "w")  # noqa: SIM115 - open for life
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False, chain=False)
        mill, hello = _load(setup.app)
        message_socket.send(Up(hello=hello))
        if mill is None:
            return 2
        if not setup.board:  # it lies with the broker, which nobody knew before us
            setup = _receive_setup(message_socket)
    except Closed:
        return 1
    process = Child(mill, setup, message_socket)
    # Both belong to the supervisor; a process that gets one by itself is replaced, gently.
    handle_signal(signal.SIGTERM, process.on_signal)
    handle_signal(signal.SIGINT, process.on_signal)
    process.serve()
    mill.close()
    return 0


def _load(app: str) -> tuple[Tidemill | None, Hello]:
    """The app, if it can be loaded, and what to tell the supervisor of it."""
    try:
        mill = load_app(app)
        queues = {task.options.queue for task in list(mill.tasks.values())}
        schedules = mill.schedules.declared()
        known = list(mill.tasks), list(mill.allow_imports)
        there = mill.url, tuple(sorted(queues)), len(mill.tasks)
        return mill, Hello(*there, "", schedules, *known)
    except BaseException as error:
        text, trace = describe(error)
        return None, Hello(error=text if isinstance(error, InvalidOption) else trace)


def _receive_setup(message_socket: MessageSocket[Up, Down]) -> Setup:
    while True:
        frames = message_socket.receive()
        if frames:
            message_socket.keep(frames[1:])  # more may have been said by now
            assert frames[0].setup is not None
            return frames[0].setup


def _die_with_parent() -> None:
    """Have the kernel end this process when its supervisor dies, even inside a C call (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ.get("TIDEMILL_SUPERVISOR", os.getppid())):
        os._exit(1)  # it died before we asked


if __name__ == "__main__":
    logging.basicConfig(
        level=os.environ.get("TIDEMILL_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s",
    )
    sys.exit(main(int(sys.argv[1])))
