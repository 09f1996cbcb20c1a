"""Access: the checks of a request's host, origin, token and rate.

Only this machine can reach a server with neither tokens nor client certificates. But a page of
another site, in a browser on this machine, may point its own name to this machine (DNS rebinding).
So a request must have this machine as its Host, and must not have another site as its Origin.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tidemill.core.clock import clock
from tidemill.server.http.problems import Problem
from tidemill.server.settings import Settings
from tidemill.server.tokens import Role, Token, Tokens

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_OURS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_CHALLENGE = {"www-authenticate": 'Bearer realm="tidemill"'}


class Client(NamedTuple):
    """The sender of a request. On a server without tokens all clients have one role."""

    name: str
    role: Role
    token: Token | None = None


def bearer_token(authorization: str) -> str:
    """The token of a header ``Authorization: Bearer TOKEN``; empty for another scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Access:
    """The checks of every request, before any work is done for it."""

    def __init__(self, settings: Settings) -> None:
        self._open = settings.open
        role = settings.tls_role or Role.OPERATOR.name
        self._untold = Role.ADMIN if settings.open else Role[role.upper()]
        self._hosts = _OURS | {host.lower() for host in settings.allow_hosts}
        self.tokens = Tokens(settings.auth) if settings.auth else None
        self._rate = RateLimiter(settings.rate, settings.burst) if settings.rate else None

    def check_origin(self, method: str, host: str, origin: str, site: str) -> None:
        """Refuse a request from a page of another site, or with another Host."""
        if self.tokens is not None:  # a page of another site cannot send a token
            return
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name if ":" in name else name
        if self._open and name not in self._hosts:
            raise Problem(
                "forbidden",
                f"this server has no tokens and accepts only localhost as Host, not "
                f"{host[:100]!r}; start it with --auth or with --allow-host",
            )
        if method in _SAFE:
            return
        if (origin and origin.partition("://")[2].lower() != host.lower()) or (
            site and site not in ("same-origin", "none")
        ):
            raise Problem("forbidden", "a page of another site may not change anything here")

    def identify(self, authorization: str) -> Client:
        if self.tokens is None:
            return Client("", self._untold)
        secret = bearer_token(authorization)
        if not secret:
            raise Problem(
                "unauthorized",
                "send a token in the header Authorization: Bearer TOKEN",
                headers=_CHALLENGE,
            )
        token = self.tokens.find(secret)
        if token is None:
            raise Problem("unauthorized", "the token is unknown or has expired", headers=_CHALLENGE)
        return Client(token.name, token.rank, token)

    def check_rate(self, client: str) -> None:
        if self._rate is None:
            return
        wait = self._rate.take(client)
        if wait > 0:
            raise Problem(
                "too-many-requests",
                f"a client may send {self._rate.rate:g} requests a second; try again in "
                f"{wait:.2f} s",
                headers={"retry-after": str(max(1, round(wait)))},
            )


class RateLimiter:
    """A token bucket for each client; the buckets of the longest idle clients are forgotten."""

    MOST = 10_000

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        self.rate = rate
        self._burst = burst or max(1.0, 2 * rate)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> float:
        """Take a permit; 0 on success, or the seconds until the next permit."""
        now = clock.machine()
        left, last = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - last) * self.rate)
        wait = 0.0 if left > 1 - 1e-6 else (1 - left) / self.rate
        self._buckets[client] = (left if wait else left - 1, now)
        if len(self._buckets) > self.MOST:
            self._buckets.popitem(last=False)
        return wait
