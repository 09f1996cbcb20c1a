"""The port: it listens, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from tidemill.app import Tidemill
from tidemill.config import MAX_BODY
from tidemill.errors import InvalidOption
from tidemill.server.beanstalk.backing import Backing
from tidemill.server.beanstalk.connection import Connection
from tidemill.server.settings import Settings, is_loopback

__all__ = ["DEFAULT_PORT", "MAX_JOB_SIZE", "Port", "port_at"]

log = logging.getLogger("tidemill.server")

DEFAULT_PORT = 11300

MAX_JOB_SIZE = 65535
"""Bytes of a job's body, as beanstalkd has it when nothing is said."""


class Port:
    """Serves the beanstalkd protocol for an app, in the event loop in which it is opened.

    Args:
        host, port: where it listens; port 0 takes a free one.
        tasks: a body of the form ``{"task": …, "args": […], "kwargs": {…}}`` is a call of a task.
        trust: what comes in is signed with the app's key. The protocol knows no passwords: whoever
            reaches the port is trusted.
        max_job_size: bytes of a body.
        max_connections: open at once.
    """

    def __init__(
        self,
        mill: Tidemill,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        tasks: bool = False,
        trust: bool = False,
        max_job_size: int = MAX_JOB_SIZE,
        max_connections: int = 10_000,
    ) -> None:
        if mill.keys and not trust:
            raise InvalidOption(
                "secret_keys are set, and what comes through the beanstalk port is signed by the "
                "server, whoever sent it: say --beanstalk-trust if all who reach it may be trusted"
            )
        if not trust and not is_loopback(host):
            raise InvalidOption(
                f"{host} can be reached from other machines, and the beanstalk port has no auth: "
                "say --beanstalk-trust if all who reach it may be trusted, or take 127.0.0.1"
            )
        if not 0 < max_job_size <= MAX_BODY // 2:
            raise InvalidOption(f"a job at the beanstalk port has 1 to {MAX_BODY // 2:,} bytes")
        self.host, self.port = host, port
        self._mill = mill
        self._tasks = tasks
        self._max_job_size = max_job_size
        self._max_connections = max_connections
        self._lines: set[Connection] = set()
        self._backing: Backing | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen.

        Raises:
            InvalidOption: it cannot listen there.
            FeatureMissing: the store cannot lease jobs by name.
            BrokerUnavailable: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: self._mill.broker)
        self._backing = backing = Backing(
            self._mill, tasks=self._tasks, max_job_size=self._max_job_size
        )
        await backing.desk.open()
        try:
            self._server = await loop.create_server(
                lambda: Connection(backing, self._lines, self._max_connections),
                self.host.strip("[]"),
                self.port,
                backlog=1024,
            )
        except OSError as error:
            await backing.desk.close()
            raise InvalidOption(
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("serving beanstalkd's protocol at %s port %d", self.host, self.port)
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(signal.SIGUSR1, self.drain)

    def drain(self) -> None:
        """Accept no more jobs: a put is answered with DRAINING."""
        if self._backing is not None:
            self._backing.draining = True
            log.info("the beanstalk port is draining")

    def end(self) -> None:
        """Take no more connections; hang up where nothing is in hand."""
        if self._server is not None:
            self._server.close()
        for line in list(self._lines):
            line.end()

    def abort(self) -> None:
        """Hang up now."""
        for line in list(self._lines):
            line.abort()

    async def close(self, seconds: float = 10.0) -> None:
        """End, finish what is in hand within so many seconds, give back what clients hold."""
        self.end()
        tasks = [line.task for line in self._lines if line.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for line in list(self._lines):  # which sends what it was told
            line.close()
        if self._backing is not None:
            await self._backing.numbers.close()
            await self._backing.desk.close()
        self.abort()


def port_at(mill: Tidemill, settings: Settings) -> Port | None:
    """The port that a server's settings ask for.

    Raises:
        InvalidOption: it must not be served so.
    """
    if not settings.beanstalk:
        return None
    host, _, port = settings.beanstalk.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidOption(
            f"--beanstalk is HOST:PORT, or a port alone, not {settings.beanstalk!r}"
        )
    return Port(
        mill,
        host or "127.0.0.1",
        int(port),
        tasks=settings.beanstalk_tasks,
        trust=settings.beanstalk_trust,
        max_job_size=settings.beanstalk_max_job,
        max_connections=settings.max_connections,
    )
