"""One client's line: commands are done one after the other, however many come at once.

What a client sends ahead is kept up to ``AHEAD`` bytes, then it is not read from; what it does not
read is kept up to the transport's mark, then nothing more is done for it. So none can have the port
use more memory than that and one job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, cast

from tidemill.errors import (
    BrokerUnavailable,
    InvalidOption,
    QueueFull,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.server.beanstalk.backing import Backing
from tidemill.server.beanstalk.client import Client
from tidemill.server.beanstalk.commands import answer
from tidemill.server.beanstalk.reading import BAD_FORMAT, HANG_UP, Command, Reader, Refused
from tidemill.server.beanstalk.replies import DRAINING, INTERNAL_ERROR, OUT_OF_MEMORY

__all__ = ["Connection"]

log = logging.getLogger("tidemill.server")

AHEAD = 1 << 16
"""Bytes that a client may send while its last command is being done."""

AT_ONCE = 100
"""Commands after which others have their turn."""


class Connection(asyncio.Protocol):
    """What asyncio tells of a line. ``most`` are open at once."""

    def __init__(self, backing: Backing, lines: set[Connection], most: int) -> None:
        self._backing = backing
        self._lines = lines
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(backing.max_job_size)
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._is_slow = False  # it does not read what it was sent
        self._is_read = True
        self._later: asyncio.Handle | None = None
        self._ending = False  # the port takes no more commands
        self._closing = False

    # -- told by asyncio --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._lines) >= self._most:
            log.warning("a client of the beanstalk port is turned away: %d are there", self._most)
            self._transport.abort()
            return
        self._lines.add(self)
        self._client = self._backing.enter(self.abort)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._task is None and self._later is None:
            self._go_on()
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
        return True  # what it asked for is answered still

    def pause_writing(self) -> None:
        self._is_slow = True

    def resume_writing(self) -> None:
        self._is_slow = False
        if self._task is None and self._later is None:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lines.discard(self)
        self._leave()
        if self._later is not None:
            self._later.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            client, self._client = self._client, None
            self._backing.leave(client)

    # -- doing what it asks for -------------------------------------------------------------------

    def _go_on(self) -> None:
        """Do what is there, until something has to be waited for."""
        self._later = None
        client, said = self._client, list[bytes]()
        if client is None:
            return
        for _ in range(AT_ONCE):
            if self._is_slow or self._closing:
                break
            what = self._reader.next()
            if what is None:
                break
            if isinstance(what, Refused):
                self._count(what.verb)
                client.produces |= what.produces
                said.append(what.reply)
                continue
            if what.verb == HANG_UP:
                log.warning("the beanstalk port hangs up on a client that speaks HTTP or TLS")
                self.abort()
                return
            if what.verb == "quit":
                self._say(b"".join(said))
                self.close()
                return
            self._count(what.verb)
            reply = answer(self._backing, client, what)
            if isinstance(reply, bytes):
                said.append(reply)
                continue
            self._say(b"".join(said))
            self._begin(reply, what)
            return
        else:
            self._later = self._loop.call_soon(self._go_on)
        self._say(b"".join(said))
        if self._later is None and not self._is_slow:
            if client.has_ended:
                self.close()
            self._read(True)

    def _begin(self, reply: Coroutine[Any, Any, bytes], command: Command) -> None:
        self._task = self._loop.create_task(self._wait(reply, command))
        self._task.add_done_callback(lambda _: reply.close())  # it may never have begun

    async def _wait(self, reply: Coroutine[Any, Any, bytes], command: Command) -> None:
        try:
            said = await reply
        except (StoreFull, QueueFull):
            said = OUT_OF_MEMORY
        except StoreMoved:
            said = DRAINING
        except InvalidOption as error:
            log.info("%s at the beanstalk port: %s", command.verb, error)
            said = BAD_FORMAT
        except BrokerUnavailable as error:
            log.warning("%s at the beanstalk port: %s", command.verb, error)
            said = INTERNAL_ERROR
        except Exception as error:
            known = isinstance(error, TidemillError)
            log.error("%s at the beanstalk port: %s", command.verb, error, exc_info=not known)
            said = INTERNAL_ERROR
        self._task = None
        if not self._closing:
            self._say(said)
            if self._ending:
                self.close()
            else:
                self._go_on()

    def _count(self, verb: str) -> None:
        if verb:
            self._backing.counts[verb] += 1

    def _say(self, replies: bytes) -> None:
        if replies and self._transport is not None and not self._closing:
            self._transport.write(replies)

    def _read(self, wanted: bool) -> None:
        if wanted != self._is_read and self._transport is not None and not self._closing:
            self._is_read = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # -- the end ----------------------------------------------------------------------------------

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What is being done for it."""
        return self._task

    def close(self) -> None:
        """Hang up, when it has read what it was sent."""
        self._leave()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Hang up now."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self._closing = True
        if self._client is not None:
            self._client.has_left = True

    def end(self) -> None:
        """Hang up, once the command that is being done has its answer; who waits gets none."""
        self._ending = True
        if self._task is None or (self._client is not None and self._client.waiting):
            self.close()
