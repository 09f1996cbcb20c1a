"""A request to the dashboard, the same for every framework."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote

from tidemill.core.errors import InvalidOption
from tidemill.dashboard.roles import User

MOST_BODY = 1 << 20
"""The most bytes of a form."""

_MOST_FIELDS = 2000
_MOST_QUERY = 16_384


class Request:
    """One request.

    Attributes:
        method: ``GET``, ``HEAD`` or ``POST``.
        root: the path at which the dashboard is mounted, without a slash at its end.
        path: the rest of the path, decoded, which begins with a slash.
        query, form: lists of values by name, from the URL and from a POST.
        headers: by lower-case name.
        cookies: by name.
        user: the user who sends the request; None for a request without a user.
        secure: True when the browser uses https.
    """

    def __init__(
        self,
        method: str,
        path: str,
        query: str = "",
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        root: str = "",
        user: User | None = None,
        secure: bool = False,
    ) -> None:
        self.method = method.upper()
        self.path = path or "/"
        self.root = root.rstrip("/")
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.user = user
        self.secure = secure
        self.query_string = query
        self.query = _fields(query, "the query of the URL", _MOST_QUERY)
        is_form = self.headers.get("content-type", "").startswith(
            "application/x-www-form-urlencoded"
        )
        text = body.decode("utf-8", "replace") if is_form else ""
        self.form = _fields(text, "the form", MOST_BODY)
        self.cookies = _cookies(self.headers.get("cookie", ""))

    def arg(self, name: str, default: str = "") -> str:
        """The last value of a query parameter, or the default."""
        return self.query.get(name, [default])[-1]

    def field(self, name: str, default: str = "") -> str:
        """The last value of a form field, or the default."""
        return self.form.get(name, [default])[-1]

    def fields(self, name: str) -> list[str]:
        """All values of a form field."""
        return self.form.get(name, [])

    @property
    def here(self) -> str:
        """The path and query of this request, from the root of the site."""
        query = f"?{self.query_string}" if self.query_string else ""
        return f"{self.root}{quote(self.path, safe='/~@:+,')}{query}"


def _fields(text: str, what: str, most: int) -> dict[str, list[str]]:
    """The values of each name.

    Raises:
        InvalidOption: the text is too long, or has too many fields.
    """
    if len(text) > most:
        raise InvalidOption(f"{what} has more than {most:,} characters")
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="replace"
        )
    except ValueError:
        raise InvalidOption(f"{what} has more than {_MOST_FIELDS:,} fields") from None
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header[:8192]).items()}
    except CookieError:
        return {}
