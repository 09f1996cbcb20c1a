"""The dashboard as a WSGI application, for Flask, Django, or any WSGI server. Its pages poll."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from tidemill.core.errors import InvalidOption
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.long_body import filled
from tidemill.dashboard.request import MOST_BODY, Request
from tidemill.dashboard.response import Response
from tidemill.dashboard.roles import User

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class WsgiDashboard:
    """A WSGI application. ``user`` gets the ``environ`` of a request."""

    def __init__(
        self, dashboard: Dashboard, user: Callable[[Environ], User | None] | None = None
    ) -> None:
        self.dashboard = dashboard
        self._user = user

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        try:
            response = self.dashboard.handle(self._request(environ))
        except InvalidOption as error:
            response = Response(str(error), 400, "text/plain; charset=utf-8")
        headers = list(response.headers)
        body = response.body
        if isinstance(body, bytes):
            headers.append(("content-length", str(len(body))))
        status = HTTPStatus(response.status)
        start_response(f"{status.value} {status.phrase}", headers)
        return [body] if isinstance(body, bytes) else filled(response.parts())

    def _request(self, environ: Environ) -> Request:
        headers = {
            name[5:].replace("_", "-").lower(): str(value)
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        headers["content-type"] = environ.get("CONTENT_TYPE", "")
        length = environ.get("CONTENT_LENGTH") or "0"
        size = int(length) if length.isdigit() else 0
        if size > MOST_BODY:
            raise InvalidOption(f"the form has more than {MOST_BODY:,} bytes")
        path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")
        return Request(
            environ["REQUEST_METHOD"],
            path,
            environ.get("QUERY_STRING", ""),
            environ["wsgi.input"].read(size) if size else b"",
            headers=headers,
            root=quote(environ.get("SCRIPT_NAME", ""), safe="/"),
            user=self._user(environ) if self._user is not None else User(""),
            secure=environ.get("wsgi.url_scheme") == "https",
        )
