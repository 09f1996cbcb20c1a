"""The dashboard: from a request to an answer, in the thread of the caller.

route      the function of the path and the method
admit      the user, the origin of the request, and the role that the function needs
answer     make the page; an error becomes a page, too
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from tidemill.app import Tidemill
from tidemill.core.clock import reader_zone
from tidemill.dashboard import (
    audit,
    bulk,
    failures,
    flows,
    http,
    job,
    jobs,
    limits,
    look,
    overview,
    queues,
    schedules,
    settings,
    tasks,
    workers,
)
from tidemill.dashboard.formats import zone_named
from tidemill.dashboard.http import MOST_BODY, LongResponse, Request
from tidemill.dashboard.look import Cache, Looks, News
from tidemill.dashboard.page import Forbidden, NotFound, Page
from tidemill.dashboard.roles import Role, User, role_named
from tidemill.dashboard.routes import Route, routes_at
from tidemill.dashboard.security import HEADERS, Signer, is_same_origin
from tidemill.errors import (
    BrokerUnavailable,
    FeatureMissing,
    InvalidOption,
    JobNotFound,
    ScheduleNotFound,
    TidemillError,
)

log = logging.getLogger("tidemill.dashboard")

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Who = Callable[[Any], User | Awaitable[User | None] | None]

_OTHERS = Router()  # answers the start and the end of a server, and refuses web sockets
MODULES = (  # each has its ``routes``; the first route that matches a path answers
    http,
    look,
    overview,
    queues,
    jobs,
    job,
    failures,
    tasks,
    schedules,
    flows,
    limits,
    workers,
    bulk,
    audit,
    settings,
)

NAVIGATION = (  # path, name, icon and key (after ``g``) of each link
    ("/", "Overview", "gauge", "o"),
    ("/queues", "Queues", "queues", "q"),
    ("/jobs", "Jobs", "list", "j"),
    ("/failed", "Failed", "cross", "f"),
    ("/tasks", "Tasks", "code", "t"),
    ("/schedules", "Schedules", "clock", "s"),
    ("/flows", "Flows", "flow", "l"),
    ("/limits", "Limits", "limit", "i"),
    ("/workers", "Workers", "workers", "w"),
    ("/bulk", "Bulk", "stack", "b"),
    ("/audit", "Audit", "audit", "a"),
    ("/settings", "Settings", "settings", "e"),
)


class Dashboard:
    """The pages of one app.

    Args:
        mill: the app, or an app made only for its URL.
        title: the name at the top of each page, such as the name of the site.
        secret: the key that signs the message after an action. All processes that serve one
            dashboard need the same secret. Without a secret, the ``secret_keys`` of the app sign.
        see_arguments: the least role that sees arguments and results of jobs.
        edit_jobs: the least role that may change arguments and run a job again.
        app: the app as ``tidemill worker`` takes it, for the commands that pages show.
        zone: the time zone of the site, such as ``Europe/Berlin``. Viewers see times in this zone
            until they choose UTC or the zone of their browser. Without it, they first see times in
            the zone of their browser.
        live: how pages learn of changes: ``"sse"`` by a stream of events, ``"poll"`` by repeated
            requests.
        extra: further routes of the server or site. They are tried first. A site with a login page
            has ``/logout``.
        ended: True when the process ends, so that event streams end.

    Raises:
        InvalidOption: a role or the time zone is unknown.
    """

    def __init__(
        self,
        mill: Tidemill,
        *,
        title: str = "Tidemill",
        secret: str | bytes = "",
        see_arguments: str | Role = Role.VIEWER,
        edit_jobs: str | Role = Role.ADMIN,
        app: str = "MODULE:VAR",
        zone: str = "",
        live: str = "sse",
        extra: Sequence[Route] = (),
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.mill = mill
        self.title = title
        self.app = app
        self.zone = zone
        if zone and zone_named(zone) is None:
            raise InvalidOption(f"zone must be a time zone such as Europe/Berlin, not {zone!r}")
        self.live = live
        self.logout = any(route.path == "/logout" for route in extra)
        self.see_arguments = role_named("see_arguments", see_arguments)
        self.edit_jobs = role_named("edit_jobs", edit_jobs)
        self.signer = Signer(secret, mill.runtime.keys)
        self.looks = Looks(mill)
        self.news = News(self.looks, ended)
        self.cache = Cache()
        self.routes = [*extra, *(route for module in MODULES for route in module.routes.list)]
        self.navigation = NAVIGATION

    def serves(self, path: str) -> bool:
        return bool(routes_at(self.routes, path))

    def handle(self, scope: Scope, user: User | None, body: bytes = b"") -> Response:
        """Answer a request. This call blocks while the store works; it raises no error."""
        response: Response
        try:
            request = Request(scope, body)
        except HTTPException as error:
            response = PlainTextResponse(error.detail, error.status_code)
        else:
            page = Page(self, request, user or User("", Role.VIEWER))
            reader = reader_zone.set(zone_named(page.zone))
            try:
                response = self._answer(page, known=user is not None)
            finally:
                reader_zone.reset(reader)
            response.headers["X-Zone"] = page.zone
        response.headers.update(HEADERS)
        if scope["method"] == "HEAD":
            bare = Response(status_code=response.status_code)
            bare.raw_headers = response.raw_headers
            return bare
        return response

    def _answer(self, page: Page, *, known: bool) -> Response:
        try:
            return self._handle(page, known=known)
        except Forbidden as error:
            return self._error(page, 403, "You may not do this", str(error))
        except (NotFound, JobNotFound, ScheduleNotFound) as error:
            return self._error(page, 404, "Not found", str(error))
        except FeatureMissing as error:
            status = 200 if self._is_in_navigation(page.request) else 501
            return self._error(page, status, "This broker cannot do that", str(error))
        except BrokerUnavailable as error:
            return self._error(page, 503, "The store cannot be reached", str(error))
        except TidemillError as error:
            if page.request.method == "POST" and page.request.field("back"):
                return page.back(str(error), kind="error")
            return self._error(page, 400, "That did not work", str(error))
        except Exception:
            log.exception("%s %s failed", page.request.method, page.request.path)
            text = "The dashboard failed to make this page; the log of its process has the details."
            return self._error(page, 500, "Something broke", text)

    def _is_in_navigation(self, request: Request) -> bool:
        """True for a page that exists on each broker, even if it only names a missing feature."""
        return request.method == "GET" and request.path in (link[0] for link in self.navigation)

    def _handle(self, page: Page, *, known: bool) -> Response:
        request = page.request
        found = routes_at(self.routes, request.path)
        method = "GET" if request.method == "HEAD" else request.method
        route, values = found.get(method, (None, {}))
        if not known and (route is None or route.role is not None):
            return self._ask_for_login(page)
        if method == "POST" and not is_same_origin(request):
            raise Forbidden("the browser did not say that a page of this site sent the form")
        if not found:
            raise NotFound(f"there is no page at {request.path[:200]}")
        if route is None:
            return Response("use another method", 405, {"allow": ", ".join(found)})
        if route.role is not None:
            page.need(route.role)
        return route.handler(page, **values)

    def _ask_for_login(self, page: Page) -> Response:
        if not self.logout:
            raise Forbidden("the site does not know you: log in first")
        is_page = page.request.method == "GET" and page.request.path != "/live"
        if not is_page or page.request.headers.get("x-live"):
            return PlainTextResponse("log in first", 401)
        here = page.request.here
        return page.redirect(page.url("/login", next=here if here != page.url("/") else ""))

    def _error(self, page: Page, status: int, title: str, text: str) -> Response:
        still = status < 500
        return page.render("error.html", status, title=title, section="", text=text, still=still)


class AsgiDashboard:
    """An ASGI application. ``user`` gets the scope of a request; it may be async."""

    def __init__(self, dashboard: Dashboard, user: Who | None = None) -> None:
        self.dashboard = dashboard
        self._user = user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _OTHERS(scope, receive, send)
            return
        user = self._user(scope) if self._user is not None else User("")
        if inspect.isawaitable(user):
            user = await user
        body = bytearray()
        try:
            async for part in StarletteRequest(scope, receive).stream():
                body += part[: MOST_BODY + 1 - len(body)]  # read and drop what is too much
        except ClientDisconnect:
            return
        handle = self.dashboard.handle
        response = await self.dashboard.mill.runtime.threaded(handle, scope, user, bytes(body))
        await response(scope, receive, send)


class WsgiDashboard:
    """A WSGI application. ``user`` gets the ``environ`` of a request.

    Each request runs in the thread of its server, without an event loop. So a server may fork after
    it has loaded the application, and ``user`` may use what the site keeps for each thread.
    """

    def __init__(
        self, dashboard: Dashboard, user: Callable[[Environ], User | None] | None = None
    ) -> None:
        self.dashboard = dashboard
        self._user = user

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        user = self._user(environ) if self._user is not None else User("")
        length = environ.get("CONTENT_LENGTH") or "0"
        size = min(int(length), MOST_BODY + 1) if length.isdigit() else 0
        body = environ["wsgi.input"].read(size) if size else b""
        response = self.dashboard.handle(scope_of(environ), user, body)
        status = HTTPStatus(response.status_code)
        headers = [(name.decode(), value.decode("latin-1")) for name, value in response.raw_headers]
        start_response(f"{status.value} {status.phrase}", headers)
        return parts_of(response)


def scope_of(environ: Mapping[str, Any]) -> Scope:
    root, path = (
        str(environ.get(name, "")).encode("latin-1").decode("utf-8", "replace")
        for name in ("SCRIPT_NAME", "PATH_INFO")
    )
    return {
        "type": "http",
        "method": environ["REQUEST_METHOD"],
        "scheme": environ.get("wsgi.url_scheme", "http"),
        "root_path": root,
        "path": root + path,
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": [
            (_header(name), str(value).encode("latin-1", "replace"))
            for name, value in environ.items()
            if name.startswith("HTTP_") or name == "CONTENT_TYPE"
        ],
    }


def _header(name: str) -> bytes:
    return name.removeprefix("HTTP_").replace("_", "-").lower().encode("latin-1", "replace")


def parts_of(response: Response) -> Iterable[bytes]:
    """The body of an answer for WSGI, without empty parts. It may be closed."""
    if isinstance(response, LongResponse):
        return _filled(response.parts)
    return [bytes(response.body)]


def _filled(parts: Generator[bytes]) -> Generator[bytes]:
    try:
        yield from filter(None, parts)
    finally:
        parts.close()
