"""The listener of the beanstalk port, and the connections of its clients.

The port does the commands of a client one after the other. It stops reading after ``AHEAD`` bytes
of later commands, and does no more commands while too many answers are unread. So no client can
make the port use more memory than these bounds and one job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from typing import Any, cast

from tidemill.app import Tidemill
from tidemill.core.codec import MAX_BODY
from tidemill.errors import (
    BrokerUnavailable,
    InvalidOption,
    QueueFull,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.server.beanstalk import parser
from tidemill.server.beanstalk.commands import answer
from tidemill.server.beanstalk.shared_state import Client, PortState
from tidemill.server.settings import Settings, is_loopback

log = logging.getLogger("tidemill.server")

AHEAD = 1 << 16  # bytes that a client may send ahead while a command is being done
AT_ONCE = 100  # commands of one client that are done before other clients have their turn


class Connection(asyncio.Protocol):
    """The protocol of one connection. At most ``most`` connections are open."""

    def __init__(self, port: PortState, connections: set[Connection], most: int) -> None:
        self._port = port
        self._connections = connections
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._reader = parser.Reader(port.max_job_size)
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self._is_slow = False  # the client does not read its answers
        self._is_read = True
        self._later: asyncio.Handle | None = None
        self._ending = False  # the port takes no more commands
        self._closing = False

    # -- called by asyncio --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._connections) >= self._most:
            log.warning(
                "the beanstalk port refuses a connection: %d connections are open, the maximum "
                "(--max-connections)",
                self._most,
            )
            self._transport.abort()
            return
        self._connections.add(self)
        self._client = self._port.enter(self.abort)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._task is None and self._later is None:
            self._do_commands()
        if self._reader.size > AHEAD and (self._is_slow or self._task or self._later):
            self._read(False)

    def eof_received(self) -> bool:
        client = self._client
        if client is None:
            return False
        client.has_ended = True
        if client.waiting:
            client.interrupt()
        elif self._task is None and self._later is None:
            return False
        return True  # keep the connection until the current command is answered

    def pause_writing(self) -> None:
        self._is_slow = True

    def resume_writing(self) -> None:
        self._is_slow = False
        if self._task is None and self._later is None:
            self._do_commands()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._leave()
        if self._later is not None:
            self._later.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            client, self._client = self._client, None
            self._port.leave(client)

    # -- commands -----------------------------------------------------------------------------

    def _do_commands(self) -> None:
        """Do the commands that have arrived, until a command has to wait."""
        self._later = None
        client, replies = self._client, list[bytes]()
        if client is None:
            return
        for _ in range(AT_ONCE):
            if self._is_slow or self._closing:
                break
            item = self._reader.next()
            if item is None:
                break
            if isinstance(item, parser.Refused):
                self._count(item.verb)
                client.produces |= item.produces
                replies.append(item.reply)
                continue
            if item.verb == parser.HANG_UP:
                log.warning("the beanstalk port hangs up on a client that speaks HTTP or TLS")
                self.abort()
                return
            if item.verb == "quit":
                self._send(b"".join(replies))
                self.close()
                return
            self._count(item.verb)
            reply = answer(self._port, client, item)
            if isinstance(reply, bytes):
                replies.append(reply)
                continue
            self._send(b"".join(replies))
            self._begin(reply, item)
            return
        else:
            self._later = self._loop.call_soon(self._do_commands)
        self._send(b"".join(replies))
        if self._later is None and not self._is_slow:
            if client.has_ended:
                self.close()
            self._read(True)

    def _begin(self, reply: Coroutine[Any, Any, bytes], command: parser.Command) -> None:
        self._task = self._loop.create_task(self._wait(reply, command))
        self._task.add_done_callback(lambda _: reply.close())  # the task may never have started

    async def _wait(self, reply: Coroutine[Any, Any, bytes], command: parser.Command) -> None:
        try:
            result = await reply
        except (StoreFull, QueueFull):
            result = parser.OUT_OF_MEMORY
        except StoreMoved:
            result = parser.DRAINING
        except InvalidOption as error:
            log.info("%s at the beanstalk port: %s", command.verb, error)
            result = parser.BAD_FORMAT
        except BrokerUnavailable as error:
            log.warning("%s at the beanstalk port: %s", command.verb, error)
            result = parser.INTERNAL_ERROR
        except Exception as error:
            known = isinstance(error, TidemillError)
            log.error("%s at the beanstalk port: %s", command.verb, error, exc_info=not known)
            result = parser.INTERNAL_ERROR
        self._task = None
        if not self._closing:
            self._send(result)
            if self._ending:
                self.close()
            else:
                self._do_commands()

    def _count(self, verb: str) -> None:
        if verb:
            self._port.counts[verb] += 1

    def _send(self, replies: bytes) -> None:
        if replies and not self._closing:
            self._transport.write(replies)

    def _read(self, wanted: bool) -> None:
        if wanted != self._is_read and not self._closing:
            self._is_read = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # -- the end ------------------------------------------------------------------------------

    @property
    def task(self) -> asyncio.Task[None] | None:
        return self._task

    def close(self) -> None:
        """Close the connection after the client has read its answers."""
        self._leave()
        self._transport.close()

    def abort(self) -> None:
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        self._closing = True
        if self._client is not None:
            self._client.has_left = True

    def end(self) -> None:
        """Close the connection after the current command. A waiting client gets no answer."""
        self._ending = True
        if self._task is None or (self._client is not None and self._client.waiting):
            self.close()


class BeanstalkListener:
    """Serves the beanstalkd protocol for an app, in the event loop in which it is opened.

    The protocol has no passwords. With ``beanstalk_trust`` all clients that reach the port are
    trusted, and the jobs of all clients are signed with the app's key.
    """

    def __init__(self, mill: Tidemill, settings: Settings) -> None:
        host, _, port = settings.beanstalk.rpartition(":")
        self.host, most = host or "127.0.0.1", settings.beanstalk_max_job
        if not port.isdecimal() or int(port) > 65535:
            raise InvalidOption(
                f"--beanstalk must be HOST:PORT or a port, not {settings.beanstalk!r}"
            )
        if mill.runtime.keys and not settings.beanstalk_trust:
            raise InvalidOption(
                "secret_keys are set, and the server would sign the jobs of any client of the "
                "beanstalk port: give --beanstalk-trust if all clients can be trusted"
            )
        if not settings.beanstalk_trust and not is_loopback(self.host):
            raise InvalidOption(
                f"other machines can reach {host}, and the beanstalk port has no authentication: "
                "give --beanstalk-trust if all clients can be trusted, or use 127.0.0.1"
            )
        if not 0 < most <= MAX_BODY // 2:
            raise InvalidOption(
                f"--beanstalk-max-job must be 1 to {MAX_BODY // 2:,} bytes, not {most:,}"
            )
        self.port = int(port)
        self._mill = mill
        self._settings = settings
        self._connections: set[Connection] = set()
        self._state: PortState | None = None
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Attach the owner of all clients, and listen."""
        loop, settings = asyncio.get_running_loop(), self._settings
        await asyncio.to_thread(lambda: self._mill.broker)
        tasks, most = settings.beanstalk_tasks, settings.beanstalk_max_job
        self._state = state = PortState(self._mill, tasks=tasks, max_job_size=most)
        await state.shared_owner.open()
        try:
            self._server = await loop.create_server(
                lambda: Connection(state, self._connections, settings.max_connections),
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
            await self._state.shared_owner.close()
        self.abort()
