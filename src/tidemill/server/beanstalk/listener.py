"""The listener of the beanstalk port: opening, draining, closing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from tidemill.app import Tidemill
from tidemill.core.config import MAX_BODY
from tidemill.core.errors import InvalidOption
from tidemill.server.beanstalk.connection import Connection
from tidemill.server.beanstalk.shared_state import PortState
from tidemill.server.settings import Settings, is_loopback

log = logging.getLogger("tidemill.server")

DEFAULT_PORT = 11300

MAX_JOB_SIZE = 65535
"""The default largest body of a job, as in beanstalkd."""


class BeanstalkListener:
    """Serves the beanstalkd protocol for an app, in the event loop in which it is opened.

    Args:
        host, port: the address to listen on; port 0 takes a free port.
        tasks: a body of the form ``{"task": …, "args": […], "kwargs": {…}}`` is a call of a task.
        trust: sign the jobs of all clients with the app's key. The protocol has no passwords, so
            all clients that reach the port are trusted.
        max_job_size: the largest body of a job, in bytes.
        max_connections: the most open connections.
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
        if mill.runtime.keys and not trust:
            raise InvalidOption(
                "secret_keys are set, and the server would sign the jobs of any client of the "
                "beanstalk port: give --beanstalk-trust if all clients can be trusted"
            )
        if not trust and not is_loopback(host):
            raise InvalidOption(
                f"other machines can reach {host}, and the beanstalk port has no authentication: "
                "give --beanstalk-trust if all clients can be trusted, or use 127.0.0.1"
            )
        if not 0 < max_job_size <= MAX_BODY // 2:
            raise InvalidOption(
                f"--beanstalk-max-job must be 1 to {MAX_BODY // 2:,} bytes, not {max_job_size:,}"
            )
        self.host, self.port = host, port
        self._mill = mill
        self._tasks = tasks
        self._max_job_size = max_job_size
        self._max_connections = max_connections
        self._connections: set[Connection] = set()
        self._state: PortState | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen.

        Raises:
            InvalidOption: the address cannot be used.
            FeatureMissing: the store cannot lease jobs by their ids.
            BrokerUnavailable: the store cannot be reached.
        """
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(lambda: self._mill.broker)
        self._state = state = PortState(
            self._mill, tasks=self._tasks, max_job_size=self._max_job_size
        )
        await state.shared_owner.open()
        try:
            self._server = await loop.create_server(
                lambda: Connection(state, self._connections, self._max_connections),
                self.host.strip("[]"),
                self.port,
                backlog=1024,
            )
        except OSError as error:
            await state.shared_owner.close()
            raise InvalidOption(
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("serving beanstalkd's protocol at %s port %d", self.host, self.port)
        with contextlib.suppress(ValueError, RuntimeError):  # raised outside of the main thread
            loop.add_signal_handler(signal.SIGUSR1, self.drain)

    def drain(self) -> None:
        """Accept no more jobs: answer a put with DRAINING."""
        if self._state is not None:
            self._state.draining = True
            log.info("the beanstalk port is draining")

    def end(self) -> None:
        """Accept no more connections; close each connection after its current command."""
        if self._server is not None:
            self._server.close()
        for line in list(self._connections):
            line.end()

    def abort(self) -> None:
        """Close all connections at once."""
        for line in list(self._connections):
            line.abort()

    async def close(self, seconds: float = 10.0) -> None:
        """Finish current commands within ``seconds``, and give back all reserved jobs."""
        self.end()
        tasks = [line.task for line in self._connections if line.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for line in list(self._connections):  # the transport sends buffered answers first
            line.close()
        if self._state is not None:
            await self._state.numbers.close()
            await self._state.shared_owner.close()
        self.abort()


def listener_of(mill: Tidemill, settings: Settings) -> BeanstalkListener | None:
    """The listener for a server's settings; None when they have no beanstalk port.

    Raises:
        InvalidOption: the settings are invalid or unsafe.
    """
    if not settings.beanstalk:
        return None
    host, _, port = settings.beanstalk.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidOption(f"--beanstalk must be HOST:PORT or a port, not {settings.beanstalk!r}")
    return BeanstalkListener(
        mill,
        host or "127.0.0.1",
        int(port),
        tasks=settings.beanstalk_tasks,
        trust=settings.beanstalk_trust,
        max_job_size=settings.beanstalk_max_job,
        max_connections=settings.max_connections,
    )
