"""Run a spawned worker process: set up, load the app, serve (:mod:`tidemill.worker.child`)."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

from tidemill.app_loader import load_app
from tidemill.client.context import mark_records
from tidemill.core.log_output import LogSettings, log_output
from tidemill.errors import BrokerUnavailable, TidemillError
from tidemill.runtime import Runtime
from tidemill.worker.child import Child
from tidemill.worker.child_protocol import Closed, Down, Hello, MessageSocket, Setup, Up, hello_of
from tidemill.worker.event_loop import ProcessEvents
from tidemill.worker.forked_children import handle_signal
from tidemill.worker.verdicts import describe


def main(fd: int) -> int:
    """Serve the supervisor at the other end of the socket ``fd``; returns the exit code."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # a program that a task starts must not keep the connection open
    message_socket: MessageSocket[Up, Down] = MessageSocket(sock, Down)
    _die_with_parent()
    try:
        setup = _receive_setup(message_socket)
        # faulthandler writes to this file from C, even while a task holds the interpreter lock. The
        # thread that gets the signal writes only its own stack: reading other stacks could crash.
        stacks = open(setup.stacks, "w")  # noqa: SIM115 - open until the process ends
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False, chain=False)
        runtime, events, hello = _load(setup.app)
        message_socket.send(Up(hello=hello))
        if runtime is None or events is None:
            return 2
        if not setup.board:  # the supervisor must know the broker's URL to make the scoreboard
            setup = _receive_setup(message_socket)
    except Closed:
        return 1
    process = Child(runtime, setup, message_socket, events)
    # On SIGTERM or SIGINT this process finishes its running jobs; the supervisor replaces it.
    handle_signal(signal.SIGTERM, process.on_signal)
    handle_signal(signal.SIGINT, process.on_signal)
    process.serve()
    runtime.close()
    return 0


def _load(app: str) -> tuple[Runtime | None, ProcessEvents | None, Hello]:
    """Load the app, and call its handlers of ``process_start``. Return the report, too."""
    # The report goes to the supervisor. The app is None when a step failed.
    try:
        mark_records()  # the app may log while it is imported
        with log_output(LogSettings.from_environment()):
            runtime = load_app(app).runtime
            events = ProcessEvents(runtime)
            events.start()
        mark_records()  # again, because the app may have set another factory of log records
        return runtime, events, hello_of(runtime)
    except TidemillError as error:
        return None, None, Hello(error=str(error), unreachable=isinstance(error, BrokerUnavailable))
    except BaseException as error:
        return None, None, Hello(error=describe(error)[1])


def _receive_setup(message_socket: MessageSocket[Up, Down]) -> Setup:
    while True:
        frames = message_socket.receive()
        if frames:
            message_socket.keep(frames[1:])  # the same read may have returned later messages
            assert frames[0].setup is not None
            return frames[0].setup


def _die_with_parent() -> None:
    """Let the kernel kill this process when its supervisor dies, even inside a C call (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ.get("TIDEMILL_SUPERVISOR", os.getppid())):
        os._exit(1)  # the supervisor died before the call of prctl


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
