"""The page: each function of a route takes a page, and answers with the methods of the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import jinja2
from starlette.responses import HTMLResponse, Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic import audit
from tidemill.core.clock import clock
from tidemill.core.job import Record, State
from tidemill.dashboard.formats import FILTERS, ICONS, zone_named
from tidemill.dashboard.http import Request, version_of
from tidemill.dashboard.job_search import query_text, without_values
from tidemill.dashboard.look import Look
from tidemill.dashboard.roles import Role, User
from tidemill.dashboard.routes import part_of
from tidemill.doctor.held import Held, held_jobs
from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.dashboard.dashboard import Dashboard

T = TypeVar("T")

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
TEMPLATES.filters.update(FILTERS)
TEMPLATES.globals["icon_of"] = ICONS

_MESSAGE = "tidemill_flash"
_ZONE = "tidemill_zone"
_DAY = 86_401  # seconds; history reads more than 24 hours from rows by hour
_FEW = 20  # runs of a task; fewer do not tell what is usual


class Forbidden(Exception):
    """The user may not do this; the text says why."""


class NotFound(Exception):
    """There is nothing at this path; the text names what is missing."""


class Page:
    """One request on its way to an answer."""

    def __init__(self, dashboard: Dashboard, request: Request, user: User) -> None:
        self.dashboard = dashboard
        self.mill: Tidemill = dashboard.mill
        self.request = request
        self.user = user
        self.flashes: list[tuple[str, str]] = []  # the kind and text of the message to show once
        if "x-live" not in request.headers:  # an update leaves the message to the next page
            self.flashes = dashboard.signer.unpack(request.cookies.get(_MESSAGE, ""))
        names = (request.cookies.get(_ZONE, ""), dashboard.zone)
        self.zone = next((name for name in names if name and zone_named(name)), "UTC")
        self._look: Look | None = None

    # -- what a page shows -------------------------------------------------------------------------

    @property
    def look(self) -> Look:
        """Queues, owners and facts of the store, at most a second old."""
        if self._look is None:
            self._look = self.dashboard.looks.take()
        return self._look

    @property
    def held(self) -> Held:
        """The leased jobs, at most a second old."""
        look = self.look
        return self.cached(
            "held", 1.0, lambda: held_jobs(self.mill.broker, look.owners, look.queues)
        )

    def exceeds(self, record: Record) -> float | None:
        """The time of 99 % of the runs of a task, if the present run of its job takes longer.

        None also for a task with few runs, and for a run whose start only another machine knows.
        The history counts times by powers of two, so the result is rounded up to such a time.
        """
        if record.state is not State.RUNNING or not self.has(Feature.HISTORY):
            return None
        tasks = self.cached("p99", 10.0, lambda: self.mill.history.tasks(_DAY, by=("task",)))
        run = next((one.run for one in tasks if one.task == record.envelope.task), None)
        started = self.held.started.get(record.token)
        if started is None or run is None or run.count < _FEW or not run.p99:
            return None
        usual = 2.0 ** math.ceil(math.log2(run.p99 * 1000)) / 1000
        return usual if clock.wall() - started > usual else None

    def cached(self, key: object, seconds: float, make: Callable[[], T]) -> T:
        """An answer that all viewers share for some seconds. An action drops the answer."""
        return self.dashboard.cache.get(key, seconds, make)

    def has(self, feature: Feature) -> bool:
        return feature in self.mill.broker.features

    def may(self, role: str) -> bool:
        """True when the user has this role: ``viewer``, ``operator`` or ``admin``."""
        return self.user.role >= Role[role.upper()]

    @property
    def sees_arguments(self) -> bool:
        return self.user.role >= self.dashboard.see_arguments

    @property
    def edits_jobs(self) -> bool:
        """True when the user may change the arguments of a job and run it again."""
        return self.sees_arguments and self.user.role >= self.dashboard.edit_jobs

    def shown_search(self, text: str) -> str:
        return text if self.sees_arguments else without_values(text)

    # -- links -------------------------------------------------------------------------------------

    def url(self, path: str, *parts: str, **query: object) -> str:
        """A link: ``url("/queues/{}/pause", name)`` quotes parts and leaves out empty values."""
        given = {name: value for name, value in query.items() if value not in ("", None)}
        text = f"?{urlencode(given)}" if given else ""
        return f"{self.request.root}{path.format(*map(part_of, parts))}{text}"

    def static(self, name: str) -> str:
        return f"{self.request.root}/static/{name}?v={version_of(name)}"

    def jobs_url(self, **tokens: object) -> str:
        """The link to the jobs of a filter: ``jobs_url(state="failed", queue="mail")``."""
        return self.url("/jobs", q=jobs_query(**tokens))

    def with_query(self, **changes: object) -> str:
        """The URL of this page with other query parameters; an empty value removes a parameter."""
        query = dict(self.request.query_params)
        for name, value in changes.items():
            query.pop(name, None)
            if value not in ("", None):
                query[name] = str(value)
        text = f"?{urlencode(query)}" if query else ""
        return f"{self.request.root}{quote(self.request.path, safe='/~@:+,')}{text}"

    # -- answers -----------------------------------------------------------------------------------

    def render(self, template: str, /, status: int = 200, **values: Any) -> Response:
        """A page from a template. The frame of the page shows ``title`` and ``section``.

        ``section`` is a link of the navigation: by default the first part of the path.
        """
        values.setdefault("section", f"/{self.request.path[1:].partition('/')[0]}")
        text = TEMPLATES.get_template(template).render(
            page=self,
            url=self.url,
            jobs_url=self.jobs_url,
            with_query=self.with_query,
            navigation=self.dashboard.navigation,
            static=self.static,
            may=self.may,
            **values,
        )
        response = HTMLResponse(text, status, {"cache-control": "no-store"})
        if self.flashes and status == 200:
            self.set_cookie(response, _MESSAGE, "", age=0)
        return response

    def set_cookie(
        self, response: Response, name: str, value: str, *, age: int | None = None
    ) -> None:
        """Set a cookie that scripts and other sites cannot use; ``age`` is in seconds."""
        safe: dict[str, Any] = {"httponly": True, "samesite": "strict"}
        path, secure = self.request.root or "/", self.request.secure
        response.set_cookie(name, value, age, path=path, secure=secure, **safe)

    def redirect(self, url: str, text: str = "", kind: str = "ok") -> Response:
        """Go to another page, with a message to show there."""
        response = Response(b"", 303, {"location": url, "cache-control": "no-store"})
        if text:
            packed = self.dashboard.signer.pack((kind, text[:500]))
            self.set_cookie(response, _MESSAGE, packed, age=60)
        return response

    def back(self, text: str = "", path: str = "/", kind: str = "ok") -> Response:
        """Go back to the page that the form names in ``back``, else to ``path``."""
        back = self.request.field("back")
        root = f"{self.request.root}/"
        is_ours = back.startswith(root) and not back.startswith("//") and "\\" not in back
        is_plain = all(" " < sign < "\x7f" for sign in back)
        url = back if is_ours and is_plain and ".." not in back else self.url(path)
        return self.redirect(url, text, kind)

    # -- actions -----------------------------------------------------------------------------------

    def need(self, role: Role) -> None:
        """Raise Forbidden for a user without the role."""
        if self.user.role < role:
            raise Forbidden(
                f"this needs the role {role.name.lower()}; "
                f"{self.user.name or 'you'} has the role {self.user.role.name.lower()}"
            )

    def confirm(self, name: str) -> None:
        """Raise InvalidOption unless the user has typed this name into the field ``confirm``."""
        if self.request.field("confirm").strip() != name:
            raise InvalidOption(f"to confirm, type {name!r} exactly; nothing was changed")

    def audit(self, what: str, target: str = "", count: int = 1) -> None:
        """Write an action of this user into the audit list, after it succeeded."""
        audit.note(self.mill.broker, self.user.name, what, target, count)
        self.dashboard.looks.forget()
        self.dashboard.cache.clear()


def jobs_query(**tokens: object) -> str:
    """The search text of a filter: ``state:failed queue:mail``. Values with spaces are quoted."""
    given = {name: str(value) for name, value in tokens.items() if value not in ("", None)}
    return query_text(**given)
