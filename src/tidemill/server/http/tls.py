"""TLS: the certificates of the server, and a listener with bounds for handshakes.

asyncio tells a protocol about a connection only after the TLS handshake. So the bounds of
:mod:`.connection` do not see clients that never finish their handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sized

from tidemill.core.errors import InvalidOption
from tidemill.server.settings import Settings

log = logging.getLogger("tidemill.server")

NO_DESCRIPTORS = 1.0
"""Seconds until connections are accepted again, after an error such as no free descriptors."""

_OF_ONE_CONNECTION = frozenset(
    {
        *(errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO, errno.EPERM, errno.ENETDOWN),
        *(errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)
"""Errors of accept(2) that concern a single connection. The next connection is accepted at once."""


def tls_context(settings: Settings) -> ssl.SSLContext | None:
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


class TlsListener:
    """Accepts connections, does their TLS handshakes, and passes them to their protocols."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        established: Sized,
        settings: Settings,
    ) -> None:
        self._sock = sock
        self._context = context
        self._protocol = protocol
        self._established = established
        self._settings = settings
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept connections until cancelled; then handshakes under way are cancelled, too."""
        loop = asyncio.get_running_loop()
        self._sock.listen(2048)
        try:
            while True:
                try:
                    client, _ = await loop.sock_accept(self._sock)
                    self._begin(loop, client)
                except OSError as error:
                    log.warning("a connection cannot be accepted: %s", error.strerror)
                    if error.errno not in _OF_ONE_CONNECTION:
                        await asyncio.sleep(NO_DESCRIPTORS)
                except Exception:
                    log.exception("a connection cannot be accepted")
                    await asyncio.sleep(NO_DESCRIPTORS)
        finally:
            self._sock.close()
            for handshake in self._handshakes:
                handshake.cancel()

    def _begin(self, loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
        if len(self._established) + len(self._handshakes) >= self._settings.max_connections:
            client.close()
            return
        client.setblocking(False)
        handshake = loop.create_task(self._agree(loop, client))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _agree(self, loop: asyncio.AbstractEventLoop, client: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # the handshake has failed
            await loop.connect_accepted_socket(
                self._protocol,
                client,
                ssl=self._context,
                ssl_handshake_timeout=self._settings.header_timeout,
            )
            return
        client.close()
