"""The errors for answers without success, of the server or of a proxy in front of it."""

from __future__ import annotations

import msgspec

from tidemill.brokers.contract.rpc import MEDIA, PROTOCOL, VERSION, NotAllowed, Refusal
from tidemill.brokers.http.response import Response
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError


class ServerAway(BrokerUnavailable):
    """The server is away, perhaps only for a moment: the caller tries again."""


class OtherVersion(BrokerUnavailable):
    """The server speaks another version of the protocol."""


class _Problem(msgspec.Struct):
    """The part of a problem document (RFC 9457) that is read."""

    detail: str = ""


_REFUSAL = msgspec.msgpack.Decoder(Refusal)
_PASSING = {408: "timed out on the request", 429: "refuses so many requests", 502: "is away"}
_PASSING |= {503: "cannot serve now", 504: "does not answer"}


def unreachable(error: Exception, where: str) -> ServerAway:
    reason = str(error).strip() or type(error).__name__
    return ServerAway(
        f"cannot reach the job server at {where}: {reason}; start it, or correct the url"
    )


def refusal(response: Response, where: str) -> TidemillError:
    status, server = response.status, f"the job server at {where}"
    ours = response.headers.get("content-type") == MEDIA
    theirs = response.headers.get(PROTOCOL, "")
    if theirs and theirs != VERSION:
        return OtherVersion(
            f"{server} speaks version {theirs[:20]} of the protocol, and this tidemill speaks "
            f"version {VERSION}; use the same release on both sides"
        )
    if ours and theirs:
        try:
            error = _REFUSAL.decode(response.body).error()
        except msgspec.DecodeError as wrong:
            return BrokerUnavailable(f"the refusal of {server} cannot be read: {wrong}")
        passing = status == 503 and type(error) is BrokerUnavailable
        return ServerAway(str(error)) if passing else error
    detail = _detail(response)
    if status in _PASSING:
        return ServerAway(f"{server} {_PASSING[status]} ({status}){detail}")
    if status == 401:
        return BrokerUnavailable(
            f"{server} refuses the token{detail}; write http://:TOKEN@host, or ?token_file=PATH, "
            "or set TIDEMILL_TOKEN"
        )
    if status == 403:
        return NotAllowed(f"{server} does not allow this{detail}")
    if status == 413:
        return InvalidOption(f"{server} refuses a call of this size{detail}; put fewer at once")
    if status >= 500:
        return BrokerUnavailable(f"{server} failed ({status}){detail}; see its log")
    if 300 <= status < 400:
        target = response.headers.get("location", "?")[:200]
        return BrokerUnavailable(f"{where} redirects to {target}; use that as the url")
    return BrokerUnavailable(
        f"the server at {where} is not a job server with broker calls ({status}){detail}"
    )


def _detail(response: Response) -> str:
    try:
        detail = msgspec.json.decode(response.body, type=_Problem).detail
    except msgspec.DecodeError:
        return ""
    return f": {detail[:300].rstrip('.')}" if detail else ""
