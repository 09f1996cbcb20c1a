"""The login page of a server with tokens. The browser keeps the token in a cookie."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import cookie_parser
from starlette.responses import Response

from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import User
from tidemill.dashboard.routes import Routes


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
        self.routes.get("/login", role=None)(self._ask)
        self.routes.post("/login", role=None)(self._log_in)
        self.routes.post("/logout", role=None)(self._log_out)

    def token_of(self, cookies: str) -> str:
        """The token in the header ``Cookie`` of a request; empty for none."""
        return cookie_parser(cookies).get(self.cookie, "")

    def _ask(self, page: Page) -> Response:
        return _form(page, page.request.arg("next"))

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
