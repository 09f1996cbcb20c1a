"""The dashboard: from a request to an answer, without any framework.

admit      the method, the origin of the request, and the user
protect    the token of a form
route      the function of the path, and the role that it needs
answer     make the page; an error becomes a page, too
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidemill.app import Tidemill
from tidemill.core.errors import (
    BrokerUnavailable,
    FeatureMissing,
    JobNotFound,
    ScheduleNotFound,
    TidemillError,
)
from tidemill.dashboard.look import Cache, Looks
from tidemill.dashboard.page import Flash, Forbidden, NotFound, Page
from tidemill.dashboard.page_modules import MODULES, NAVIGATION
from tidemill.dashboard.request import Request
from tidemill.dashboard.response import Response
from tidemill.dashboard.roles import Role, User, role_named
from tidemill.dashboard.routes import Route, find_route
from tidemill.dashboard.security import CSRF_COOKIE, HEADERS, Signer, is_same_origin
from tidemill.dashboard.static_files import static_file

log = logging.getLogger("tidemill.dashboard")

FLASH_COOKIE = "tidemill_flash"
_MOST_FLASH = 3000


class Dashboard:
    """The pages of one app.

    Args:
        mill: the app, or an app made only for its URL.
        title: the name at the top of each page, such as the name of the site.
        secret: the key that signs the tokens of forms. All processes that serve one dashboard need
            the same secret. Without a secret, the ``secret_keys`` of the app sign.
        see_arguments: the least role that sees arguments and results of jobs.
        edit_jobs: the least role that may change arguments and run a job again.
        app: the app as ``tidemill worker`` takes it, for the commands that pages show.
        live: how pages learn of changes: ``"sse"`` by a stream of events, ``"poll"`` by repeated
            requests.
        extra: further routes of the server or site. They are tried first. A site with a login page
            has ``/logout``.

    Raises:
        InvalidOption: a role is unknown.
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
        live: str = "sse",
        extra: Sequence[Route] = (),
    ) -> None:
        self.mill = mill
        self.title = title
        self.app = app
        self.live = live
        self.logout = any(route.path == "/logout" for route in extra)
        self.see_arguments = role_named("see_arguments", see_arguments)
        self.edit_jobs = role_named("edit_jobs", edit_jobs)
        self.signer = Signer(secret, mill.keys)
        self.looks = Looks(mill)
        self.cache = Cache()
        self.routes = [*extra, *(route for module in MODULES for route in module.routes.list)]
        self.navigation = [link for link in NAVIGATION if self.has_page(link[0])]

    def has_page(self, path: str) -> bool:
        """True when there is a page at this path."""
        return any(route.method == "GET" and route.path == path for route in self.routes)

    def serves(self, path: str) -> bool:
        """True when a route or a static file has this path, for any method."""
        return (
            path.startswith("/static/")
            or path == "/live"
            or bool(find_route(self.routes, "", path))
        )

    def handle(self, request: Request) -> Response:
        """Answer a request. This call blocks while the store works; it raises no error."""
        if request.path.startswith("/static/") and request.method in ("GET", "HEAD"):
            response = static_file(request, request.path.removeprefix("/static/"))
        else:
            seed = self.signer.seed(request)
            user = request.user or User("", Role.VIEWER)
            page = Page(self, request, user, seed)
            response = self._answer(page)
            self._set_cookies(page, response, seed)
        response.headers += HEADERS
        if request.method == "HEAD":
            response.body = b""
        return response

    def _answer(self, page: Page) -> Response:
        try:
            return self._handle(page)
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

    def _handle(self, page: Page) -> Response:
        request = page.request
        method = "GET" if request.method == "HEAD" else request.method
        found = find_route(self.routes, method, request.path)
        if request.user is None and not (isinstance(found, tuple) and found[0].role is None):
            return self._ask_for_login(page)
        if method == "POST":
            if not is_same_origin(request):
                raise Forbidden("a page of another site may not change anything here")
            if not self.signer.is_token(request, page.user.name):
                raise Forbidden("the form is out of date: go back, reload the page, and try again")
        page.flashes += self._flashes(request)
        if isinstance(found, list):
            if found:
                return Response("use another method", 405, headers={"allow": ", ".join(found)})
            raise NotFound(f"there is no page at {request.path[:200]}")
        route, values = found
        if route.role is not None:
            page.need(route.role)
        return route.handler(page, **values)

    def _ask_for_login(self, page: Page) -> Response:
        if not self.logout:
            raise Forbidden("the site does not know you: log in first")
        is_page = page.request.method == "GET" and page.request.path != "/live"
        if not is_page or page.request.headers.get("x-live"):
            return Response("log in first", 401, "text/plain; charset=utf-8")
        here = page.request.here
        return page.redirect(page.url("/login", next=here if here != page.url("/") else ""))

    def _error(self, page: Page, status: int, title: str, text: str) -> Response:
        try:
            return page.render(
                "error.html", status, title=title, section="", text=text, still=status < 500
            )
        except Exception:  # the error page may fail for the same reason as the page
            log.exception("the page of an error failed")
            return Response(f"{title}: {text}", status, "text/plain; charset=utf-8")

    def _flashes(self, request: Request) -> list[Flash]:
        if "x-live" in request.headers:  # an update of a page: the message is for the next page
            return []
        found = self.signer.unpack(request.cookies.get(FLASH_COOKIE, ""))
        pairs = found if isinstance(found, list) else []
        return [(str(kind), str(text)) for kind, text in pairs]

    def _set_cookies(self, page: Page, response: Response, seed: str) -> None:
        request = page.request
        path, secure = request.root or "/", request.secure
        if request.cookies.get(CSRF_COOKIE) != seed:
            response.set_cookie(CSRF_COOKIE, seed, path, secure=secure)
        if page.written:
            packed = self.signer.pack(page.written)
            if len(packed) > _MOST_FLASH:
                packed = self.signer.pack(page.written[:1])
            response.set_cookie(FLASH_COOKIE, packed, path, secure=secure, age=60)
        elif FLASH_COOKIE in request.cookies and response.status == 200 and page.flashes:
            response.set_cookie(FLASH_COOKIE, "", path, secure=secure, age=0)
