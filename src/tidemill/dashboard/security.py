"""Protection of the dashboard: the origin of each action, signed messages, and headers.

A browser names the site of the page that sends a form, in ``Sec-Fetch-Site`` or in ``Origin``. No
page can change these headers. So an action needs one of these headers, with this site.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import cookie_parser
from starlette.responses import Response

from tidemill.dashboard.http import Request
from tidemill.dashboard.roles import User
from tidemill.dashboard.routes import Routes

if TYPE_CHECKING:
    from tidemill.dashboard.page import Page

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_same_origin(request: Request) -> bool:
    """True when the browser says that a page of this site, or the user, sent the request."""
    site = request.headers.get("sec-fetch-site", "")
    if site:
        return site in ("same-origin", "none")
    host = request.headers.get("origin", "").partition("://")[2]  # Origin may be "null"
    return bool(host) and host == request.headers.get("host")


class Signer:
    """Signs the message that the page after an action shows, so that nobody else can write it.

    Args:
        secret: the same text in each process that serves the dashboard.
        keys: the ``secret_keys`` of the app: the first key replaces an empty ``secret``. Without a
            ``secret`` and keys, the secret is random.
    """

    def __init__(self, secret: str | bytes = "", keys: Sequence[bytes] = ()) -> None:
        given = secret.encode() if isinstance(secret, str) else secret
        root = given or (keys[0] if keys else b"") or secrets.token_bytes(32)
        self._key = hmac.digest(root, b"tidemill dashboard", "sha256")

    def pack(self, values: tuple[str, str]) -> str:
        """Two texts as one signed text for a cookie."""
        text = base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")
        return f"{text}.{self._sign(text)}"

    def unpack(self, packed: str) -> list[tuple[str, str]]:
        """The two texts that :meth:`pack` was given; nothing for any other text."""
        text, _, signature = packed.partition(".")
        if not hmac.compare_digest(self._sign(text).encode(), signature.encode()):
            return []
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return [msgspec.json.decode(data, type=tuple[str, str])]

    def _sign(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(), "sha256").hex()


class Login:
    """The routes of a login, and the user of a request.

    Args:
        find: the user of a token; None for a wrong token. It may raise ``InvalidOption``.
        cookie: the name of the cookie.
    """

    def __init__(self, find: Callable[[str], User | None], cookie: str) -> None:
        self._find = find
        self.cookie = cookie
        self.routes = Routes()
        self.routes.get("/login", role=None)(lambda page: _form(page, page.request.arg("next")))
        self.routes.post("/login", role=None)(self._log_in)
        self.routes.post("/logout", role=None)(self._log_out)

    def token_of(self, cookies: str) -> str:
        """The token in the header ``Cookie`` of a request; empty for none."""
        return cookie_parser(cookies).get(self.cookie, "")

    def _log_in(self, page: Page) -> Response:
        token = page.request.field("token").strip()
        if not token or self._find(token) is None:
            wrong = "The token is unknown or has expired."
            return _form(page, page.request.field("back"), wrong, 403)
        response = page.back()
        page.set_cookie(response, self.cookie, token)
        return response

    def _log_out(self, page: Page) -> Response:
        response = page.redirect(page.url("/login"))
        page.set_cookie(response, self.cookie, "", age=0)
        return response


def _form(page: Page, after: str, wrong: str = "", status: int = 200) -> Response:
    values = {"title": "Log in", "section": "", "still": True}
    return page.render("login.html", status, next=after, wrong=wrong, **values)
