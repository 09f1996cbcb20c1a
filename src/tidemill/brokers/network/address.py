"""Hosts and passwords in the URLs of servers, and requests that carry a password."""

from __future__ import annotations

import re
import urllib.parse
from typing import TYPE_CHECKING, Any

from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    import urllib.request


def host_and_port(text: str, default: int, shown: str) -> tuple[str, int]:
    """The host and port in ``host:port``; ``shown`` is the URL for the error, without secrets.

    Raises:
        InvalidOption: the text is no host.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::(\d{1,5}))?", text)
    port = int(found[2] or default) if found else 0
    if not found or not 0 < port < 65536:
        raise InvalidOption(f"{text!r} in url {shown!r} is not a host or host:port")
    return urllib.parse.unquote(found[1].strip("[]")) or "localhost", port


def mask_password(url: str) -> str:
    return re.sub(r"(://[^/?@]*:).*@(?=[^@]*$)", r"\1***@", url)


def opener_without_redirects(
    *handlers: urllib.request.BaseHandler,
) -> urllib.request.OpenerDirector:
    """An opener for which a redirect is an error: a header with a password is for one host only."""
    import urllib.request  # here, since most processes never open a URL

    class Refusing(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    return urllib.request.build_opener(Refusing, *handlers)
