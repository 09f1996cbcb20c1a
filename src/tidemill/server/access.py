"""Who may come in: the address a request names, where it was sent from, its token, how often.

Without tokens the server trusts whoever reaches it, which is this machine alone. A browser on this
machine must not be turned against it: a page of another site may have its own name point here (DNS
rebinding), so a request must name this machine as its Host, and must not say that another site
sent it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

from tidemill.server.problems import Problem
from tidemill.server.settings import Settings
from tidemill.server.tokens import Role, Token, Tokens

__all__ = ["Access", "Client", "Rate"]

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_OURS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_CHALLENGE = {"www-authenticate": 'Bearer realm="tidemill"'}


class Client(NamedTuple):
    """The sender of a request: name and role of the token. Without tokens all have one role."""

    name: str
    role: Role
    token: Token | None = None


class Access:
    """What is asked of every request before anything is done for it."""

    def __init__(self, settings: Settings) -> None:
        self._open = settings.open
        role = settings.tls_role or Role.OPERATOR.name
        self._untold = Role.ADMIN if settings.open else Role[role.upper()]
        self._hosts = _OURS | {host.lower() for host in settings.allow_hosts}
        self.tokens = Tokens(settings.auth) if settings.auth else None
        self._rate = Rate(settings.rate, settings.burst) if settings.rate else None

    def check_origin(self, method: str, host: str, origin: str, site: str) -> None:
        """Refuse what a page of another site sent, or a name that is not ours.

        Raises:
            Problem: it is not to be served.
        """
        if self.tokens is not None:  # which a browser that was not given it does not send
            return
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name if ":" in name else name
        if self._open and name not in self._hosts:
            raise Problem(
                "forbidden",
                f"this server has no tokens and answers to localhost only, not to {host[:100]!r}; "
                "start it with --auth, or with --allow-host",
            )
        if method in _SAFE:
            return
        if (origin and origin.partition("://")[2].lower() != host.lower()) or (
            site and site not in ("same-origin", "none")
        ):
            raise Problem("forbidden", "a page of another site must not change anything here")

    def identify(self, authorization: str) -> Client:
        """Find the sender of a request.

        Raises:
            Problem: it shows no token, or one that is not known.
        """
        if self.tokens is None:
            return Client("", self._untold)
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Problem(
                "unauthorized",
                "give a token in the header Authorization: Bearer TOKEN",
                headers=_CHALLENGE,
            )
        token = self.tokens.find(secret.strip())
        if token is None:
            raise Problem(
                "unauthorized", "the token is not known here, or has expired", headers=_CHALLENGE
            )
        return Client(token.name, token.rank, token)

    def check_rate(self, who: str) -> None:
        """Count a request of a token or an address.

        Raises:
            Problem: there were too many.
        """
        if self._rate is None:
            return
        wait = self._rate.take(who)
        if wait > 0:
            raise Problem(
                "too-many-requests",
                f"at most {self._rate.rate:g} requests a second; try again in {wait:.2f} s",
                headers={"retry-after": str(max(1, round(wait)))},
            )


class Rate:
    """A token bucket for each of those who ask; those who have not for long are forgotten."""

    MOST = 10_000

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        self.rate = rate
        self._burst = burst or max(1.0, 2 * rate)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> float:
        """Take one; 0, or the seconds until there is one."""
        now = time.monotonic()
        left, last = self._buckets.pop(who, (self._burst, now))
        left = min(self._burst, left + (now - last) * self.rate)
        wait = 0.0 if left > 1 - 1e-6 else (1 - left) / self.rate
        self._buckets[who] = (left if wait else left - 1, now)
        if len(self._buckets) > self.MOST:
            self._buckets.popitem(last=False)
        return wait
