"""The server process: sockets, signals, and a graceful shutdown.

    TERM, INT       accept no more connections, answer long polls, finish requests, exit with 0
    TERM, INT again at least 0.2 s later: stop at once

A change whose client has its answer is never lost, because the answer is sent after the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from tidemill.app import Tidemill
from tidemill.client.history import QueueSnapshots
from tidemill.errors import InvalidOption, TidemillError
from tidemill.server.beanstalk.listener import BeanstalkListener
from tidemill.server.http.access_log import AccessLog
from tidemill.server.http.application import make_app
from tidemill.server.http.backend import Backend
from tidemill.server.http.connection import Connection
from tidemill.server.http.request_pipeline import RequestPipeline
from tidemill.server.settings import Settings, check, is_loopback
from tidemill.server.tokens import read

log = logging.getLogger("tidemill.server")

LAST_SNAPSHOT = 2.0  # seconds that the snapshot of the queues may take at the end

SAME_SIGNAL = 0.2
"""Seconds within which a second TERM or INT counts as the first signal.

A process manager signals both the process and its group.
"""


def serve(mill: Tidemill, settings: Settings, worker: Sequence[str] = ()) -> int:
    """Serve until a signal; return the exit code.

    With ``worker``, the arguments of ``tidemill worker``, the server runs a worker, too.

    Raises:
        InvalidOption: the settings are unsafe or cannot be used.
        BrokerUnavailable: the store cannot be reached.
    """
    check(settings)
    if mill.runtime.keys and settings.open:
        raise InvalidOption(
            "the app has secret_keys, and the server would sign the jobs of any client: "
            "give --auth FILE with tokens (tidemill token create), or --tls-ca"
        )
    tls = _tls_context(settings)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(mill, settings, worker, tls).run())


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal.

    uvicorn's own loop checks ten times a second whether to end; here :meth:`end` wakes the loop.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._signalled_at = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Tick once a second, which updates the Date header of answers."""
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 10  # uvicorn counts ten ticks a second
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signalled_at.wait(), 1.0)

    def end(self) -> None:
        """Accept no more connections, finish open requests, and end."""
        self.should_exit = True
        self._signalled_at.set()


class _Server:
    def __init__(
        self,
        mill: Tidemill,
        settings: Settings,
        worker: Sequence[str],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._mill = mill
        self._tls = tls
        self._settings = settings
        self._embedded_worker = EmbeddedWorker(worker, self._end_with) if worker else None
        self._code = 0
        self._snapshots = QueueSnapshots()
        self._signalled_at = 0.0  # loop time of the first TERM or INT

    async def run(self) -> int:
        """Open all parts, serve, and close them; return the exit code."""
        settings = self._settings
        beanstalk = BeanstalkListener(self._mill, settings) if settings.beanstalk else None
        self._parts = [part for part in (beanstalk, self._embedded_worker) if part is not None]
        backend = Backend(self._mill, settings)
        try:
            await backend.open()
            if beanstalk is not None:
                await beanstalk.open()
            access_log = None
            if settings.access_log:
                form = {"as_json": settings.log_json, "steps": settings.log_steps}
                access_log = AccessLog(sys.stderr, **form)
            self.app = make_app(backend, access_log)
            self.uvicorn = _Uvicorn(_config(self.app, settings, self._tls))
            self.backend = backend
            await self._serve()
            if access_log is not None:
                access_log.flush()
        finally:
            if beanstalk is not None:
                await beanstalk.close(settings.shutdown_timeout)
            await backend.close()
            if self._embedded_worker is not None:
                self._embedded_worker.end()
                self._code = self._code or await self._embedded_worker.ended()
        return self._code

    def _end_with(self, code: int) -> None:
        """Shut down because an essential part has ended with this code."""
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
        if self._embedded_worker is not None:
            self._embedded_worker.start()
        helpers = [loop.create_task(self._sweep()), loop.create_task(self._keep_snapshots())]
        try:
            await self.uvicorn.serve([sock])
        finally:
            for helper in helpers:
                helper.cancel()
            with contextlib.suppress(TimeoutError):  # an unreachable store must not delay the end
                await asyncio.wait_for(self._keep_snapshot(ending=True), LAST_SNAPSHOT)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.app.sweep()

    async def _keep_snapshots(self) -> None:
        """Keep the totals of the queues once a minute: the clients of a server do not."""
        while True:
            await self._keep_snapshot()
            self._snapshots.acted()
            await asyncio.sleep(self._snapshots.due_in())

    async def _keep_snapshot(self, *, ending: bool = False) -> None:
        mill = self._mill
        try:
            await mill.runtime.threaded(lambda: self._snapshots.keep(mill.broker, ending=ending))
        except (TidemillError, OSError) as error:
            log.warning("the totals of queues are not kept for this minute: %s", error)

    def _on_signal(self, signum: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self._signalled_at:
            self._signalled_at = now
            log.info("ending: %s", signal.Signals(signum).name)
            self._stop()
        elif now - self._signalled_at > SAME_SIGNAL:
            log.warning("stopping now: %s again", signal.Signals(signum).name)
            self.uvicorn.force_exit = True
            for connection in list(self.uvicorn.server_state.connections):
                connection.transport.abort()
            for part in self._parts:
                part.abort()

    def _stop(self) -> None:
        self.backend.stop()
        for part in self._parts:
            part.end()
        self.uvicorn.end()


def _config(app: RequestPipeline, settings: Settings, tls: ssl.SSLContext | None) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # errors are logged here
    config = uvicorn.Config(
        app,
        http=Connection,
        limit_concurrency=settings.max_connections + 1,  # the new connection counts, too
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(settings.keep_alive),
        timeout_graceful_shutdown=int(settings.shutdown_timeout),
    )
    config.load()
    config.ssl = tls
    return config


def _tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context of the server; None for a server without TLS.

    Raises:
        InvalidOption: a file cannot be used; the message names the file.
    """
    files = {
        "--tls-cert": settings.tls_cert,
        "--tls-key": settings.tls_key,
        "--tls-ca": settings.tls_ca,
    }
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for option, path in files.items():
        try:
            if path:
                with open(path, "rb"):  # an error of OpenSSL does not name the file
                    pass
            if path and option == "--tls-ca":
                context.load_verify_locations(path)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise InvalidOption(f"{option} {path} cannot be used: {_reason(error)}") from None
    if not settings.tls_cert:
        return None
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise InvalidOption(
            f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} cannot be used "
            f"together: {_reason(error)}"
        ) from None
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "the file is not PEM").lower().replace("_", " ")
    return error.strerror or str(error)


def _listen(settings: Settings) -> socket.socket:
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
        log.warning("tokens travel unencrypted: give --tls-cert, or put a proxy with TLS in front")
    if settings.auth and not read(settings.auth):
        log.warning("%s has no tokens: create one, or every request is refused", settings.auth)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # uvloop has no wheels for some systems
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    """Raise the limit of open files, since each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


CLEAN, UNUSABLE = 0, 2
"""Exit codes of a worker: 0 for success, 2 for an app that no restart could load."""

SHORTEST, LONGEST = 1.0, 30.0  # seconds before a restart; each pause is twice as long as the last


class EmbeddedWorker:
    """The worker of a server: ``serve`` with a worker is a whole job system in one command.

    The worker is a process of its own, so the server runs no user code, and user code cannot hold
    the server's interpreter lock. The worker ends with the server, however the server ends. When
    the worker ends by itself, the server starts it again. ``unusable`` is called with the exit code
    when the worker cannot start at all.
    """

    def __init__(self, arguments: Sequence[str], unusable: Callable[[int], None]) -> None:
        self._command = [sys.executable, "-m", "tidemill", "worker", *arguments]
        self._unusable = unusable
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._watch: asyncio.Task[int] | None = None

    def start(self) -> None:
        """Start the worker, and start it again whenever it ends by itself."""
        self._watch = asyncio.ensure_future(self._run())

    async def _run(self) -> int:
        pause = SHORTEST
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--ends-with",
                str(os.getpid()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the server forwards a Ctrl-C
            )
            if self._stopping:
                self.abort()  # end() was called before the process existed
            code = await self._process.wait()
            if self._stopping:
                return code
            if code == UNUSABLE:
                self._unusable(code)
                return code
            log.error("the worker ended with %d; starting it again in %g s", code, pause)
            await asyncio.sleep(pause)
            if self._stopping:
                return CLEAN
            pause = min(2 * pause, LONGEST)

    def end(self) -> None:
        """Tell the worker to finish its running jobs; further calls do nothing."""
        if not self._stopping:
            self._stopping = True
            self.abort()

    def abort(self) -> None:
        """Signal the worker; after :meth:`end` it stops at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until the worker has ended; return its exit code."""
        return await self._watch if self._watch is not None else CLEAN
