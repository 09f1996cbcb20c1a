"""What a server, or whoever stands before it, says, as a sentence that says what to do."""

from __future__ import annotations

import msgspec

from tidemill.brokers.calls import MEDIA, PROTOCOL, VERSION, Refusal
from tidemill.brokers.http.response import Response
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError

__all__ = ["Away", "refusal", "unreachable"]


class Away(BrokerUnavailable):
    """It may be over in a moment: whoever has patience tries again."""


class _Problem(msgspec.Struct):
    """What is read of an error in the form of RFC 9457."""

    detail: str = ""


_REFUSAL = msgspec.msgpack.Decoder(Refusal)
_PASSING = {408: "gave up waiting for us", 429: "has too much to do", 502: "is not there"}
_PASSING |= {503: "cannot serve now", 504: "does not answer"}


def unreachable(error: Exception, where: str) -> Away:
    """The error for a line that cannot be made, or broke."""
    said = str(error).strip() or type(error).__name__
    return Away(f"cannot reach the job server at {where}: {said}")


def refusal(response: Response, where: str) -> TidemillError:
    """The error that an answer stands for, which is no answer to the call."""
    status, server = response.status, f"the job server at {where}"
    ours = response.headers.get("content-type") == MEDIA
    theirs = response.headers.get(PROTOCOL, "")
    if theirs and theirs != VERSION:
        return BrokerUnavailable(
            f"{server} speaks version {theirs[:20]} of the protocol, and this tidemill version "
            f"{VERSION}; have both be of one release"
        )
    if ours and theirs:
        try:
            error = _REFUSAL.decode(response.body).error()
        except msgspec.DecodeError as wrong:
            return BrokerUnavailable(f"{server} refuses in a way nobody understands: {wrong}")
        passing = status == 503 and type(error) is BrokerUnavailable
        return Away(str(error)) if passing else error
    detail = _detail(response)
    if status in _PASSING:
        return Away(f"{server} {_PASSING[status]} ({status}){detail}")
    if status == 401:
        return BrokerUnavailable(
            f"{server} refuses the token{detail}; write http://:TOKEN@host, or ?token_file=PATH, "
            "or set TIDEMILL_TOKEN"
        )
    if status == 403:
        return BrokerUnavailable(f"{server} does not allow this{detail}")
    if status == 413:
        return InvalidOption(f"{server} takes nothing of this size{detail}; put fewer at once")
    if status >= 500:
        return BrokerUnavailable(f"{server} made a mistake ({status}){detail}; its log has it")
    if 300 <= status < 400:
        target = response.headers.get("location", "?")[:200]
        return BrokerUnavailable(f"{where} sends us on to {target}; give that as the url")
    return BrokerUnavailable(
        f"what answers at {where} is no job server that keeps brokers ({status}){detail}"
    )


def _detail(response: Response) -> str:
    try:
        said = msgspec.json.decode(response.body, type=_Problem).detail
    except msgspec.DecodeError:
        return ""
    return f": {said[:300].rstrip('.')}" if said else ""
