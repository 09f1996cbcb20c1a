"""One process that serves: sockets, signals, a graceful end.

    TERM, INT   take no more connections, answer long polls, finish what is in hand, end with 0
    again       stop now

Whatever a client was told is stored by then: an answer is sent after its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from tidemill.app import Tidemill
from tidemill.errors import InvalidOption
from tidemill.server.app import make_app
from tidemill.server.backend import Backend
from tidemill.server.beanstalk.port import port_at
from tidemill.server.beside import Beside
from tidemill.server.connection import Connection, connection_class, sweep
from tidemill.server.edge import Edge
from tidemill.server.logs import AccessLog
from tidemill.server.settings import Settings, check, is_loopback
from tidemill.server.tls import TlsListener, tls_context
from tidemill.server.tokens import read

__all__ = ["serve"]

log = logging.getLogger("tidemill.server")

SAME_SIGNAL = 0.2
"""Seconds within which a second TERM or INT is the first: process managers signal a process and its
group."""


def serve(mill: Tidemill, settings: Settings, worker: Sequence[str] = ()) -> int:
    """Serve until told to stop; the exit code. ``worker`` has the arguments of one to run beside.

    Raises:
        InvalidOption: it must not, or cannot, be served so.
        BrokerUnavailable: the store cannot be reached.
    """
    check(settings)
    if mill.keys and settings.open:
        raise InvalidOption(
            "the app has secret_keys, and the server would sign jobs for whoever reaches it: "
            "give --auth FILE with tokens (tidemill token create), or --tls-ca"
        )
    tls = tls_context(settings)
    _more_files()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(mill, settings, worker, tls).run())


class _Uvicorn(uvicorn.Server):
    """uvicorn with signals left to us: it would end with the signal, where we end with 0.

    And it looks ten times a second whether it is to end, where we tell it.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Once a second, for the date that answers have."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 10  # by which it counts its seconds
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 1.0)

    def end(self) -> None:
        """Take no more connections, finish what is in hand, and end."""
        self.should_exit = True
        self._told.set()


class _Server:
    """The life of one server."""

    def __init__(
        self,
        mill: Tidemill,
        settings: Settings,
        worker: Sequence[str],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._mill = mill
        self._tls = tls
        self._listener: asyncio.Task[None] | None = None
        self._settings = settings
        self._beside = Beside(worker, self._end_with) if worker else None
        self._code = 0
        self._told = 0.0  # loop time of the first TERM or INT

    async def run(self) -> int:
        """From start to end."""
        settings = self._settings
        self.port = port_at(self._mill, settings)
        backend = Backend(self._mill, settings)
        try:
            await backend.open()
            if self.port is not None:
                await self.port.open()
            access_log = None
            if settings.access_log:
                access_log = AccessLog(sys.stderr, as_json=settings.log_json)
            self.connections = connection_class(settings)
            self.app = make_app(backend, access_log)
            self.uvicorn = _Uvicorn(_config(self.app, settings, self.connections))
            self.backend = backend
            await self._serve()
            if access_log is not None:
                access_log.flush()
        finally:
            if self.port is not None:
                await self.port.close(settings.shutdown_timeout)
            await backend.close()
            if self._beside is not None:
                self._beside.stop()
                self._code = self._code or await self._beside.ended()
        return self._code

    def _end_with(self, code: int) -> None:
        """Something without which this is no server has ended so."""
        self._code = code
        self._stop()

    async def _serve(self) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        sock = _listen(settings)
        host, port = sock.getsockname()[:2]
        scheme = "https" if settings.tls_cert else "http"
        where = f"[{host}]" if ":" in host else host
        log.info("serving %s at %s://%s:%d", self._mill.broker.url, scheme, where, port)
        _warn(settings)
        if self._beside is not None:
            self._beside.start()
        sweeper = loop.create_task(self._sweep())
        if self._tls is not None:
            self._listener = loop.create_task(self._listen_with_tls(sock))
            self._listener.add_done_callback(self._on_listener_end)
        try:
            await self.uvicorn.serve([sock] if self._listener is None else [])
        finally:
            sweeper.cancel()

    async def _listen_with_tls(self, sock: socket.socket) -> None:
        assert self._tls is not None
        server = self.uvicorn

        def protocol() -> Connection:
            return self.connections(server.config, server.server_state, {})

        established = server.server_state.connections
        await TlsListener(sock, self._tls, protocol, established, self._settings).run()

    def _on_listener_end(self, listener: asyncio.Task[None]) -> None:
        """End the server when nothing accepts connections any more."""
        if not listener.cancelled():
            log.error("no connection can be accepted", exc_info=listener.exception())
            self._end_with(1)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            sweep(self.connections, self._settings)
            self.app.sweep()

    def _on_signal(self, signum: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self._told:
            self._told = now
            log.info("ending: %s", signal.Signals(signum).name)
            self._stop()
        elif now - self._told > SAME_SIGNAL:
            log.warning("stopping now: %s again", signal.Signals(signum).name)
            self.uvicorn.force_exit = True
            for connection in list(self.uvicorn.server_state.connections):
                connection.transport.abort()
            if self.port is not None:
                self.port.abort()
            if self._beside is not None:
                self._beside.stop_now()

    def _stop(self) -> None:
        self.backend.stop()
        if self.port is not None:
            self.port.end()
        if self._beside is not None:
            self._beside.stop()
        if self._listener is not None:
            self._listener.cancel()
        self.uvicorn.end()


def _config(app: Edge, settings: Settings, connections: type[Connection]) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # each bad request is a warning
    return uvicorn.Config(
        app,
        http=connections,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(settings.keep_alive),
        timeout_graceful_shutdown=int(settings.shutdown_timeout),
    )


def _listen(settings: Settings) -> socket.socket:
    """The socket, bound before anything else is begun."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise InvalidOption(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        ) from None
    sock.setblocking(False)
    return sock


def _warn(settings: Settings) -> None:
    if settings.auth and not settings.tls_cert and not is_loopback(settings.host):
        log.warning("tokens travel in the clear: give --tls-cert, or put a proxy with TLS before")
    if settings.auth and not read(settings.auth):
        log.warning("%s has no tokens: nobody gets in before one is made", settings.auth)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # it has no wheels for some systems
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _more_files() -> None:
    """Each connection is a file: take as many as this process may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
