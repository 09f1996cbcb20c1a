"""The dashboard under a URL of the project: ``path("tidemill/", tidemill.django.dashboard.urls)``.

Staff users who may view jobs are viewers. Viewers who may change and delete jobs, and change queues
and schedules, are operators. Operators who may also delete queues and schedules are admins. A user
who is not logged in gets the login page; other users are refused.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Generator
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.handlers.asgi import ASGIRequest
from django.db import transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import NoReverseMatch, re_path, reverse
from django.views.decorators.csrf import csrf_exempt
from starlette.responses import Response
from starlette.types import Scope

from tidemill.dashboard.dashboard import Dashboard, parts_of, scope_of
from tidemill.dashboard.http import MOST_BODY, LongResponse
from tidemill.dashboard.roles import Role, User
from tidemill.django.project import project_mill

_OPERATOR = (
    *("tidemill.change_job", "tidemill.delete_job"),
    *("tidemill.change_queue", "tidemill.change_schedule"),
)
_ADMIN = (*_OPERATOR, "tidemill.delete_queue", "tidemill.delete_schedule")


@functools.cache
def dashboard() -> Dashboard:
    """The dashboard of the project's app. Its pages poll: WSGI cannot hold a stream open."""
    secret = f"tidemill.dashboard {settings.SECRET_KEY}"
    return Dashboard(project_mill(), secret=secret, live="poll", zone=settings.TIME_ZONE or "")


def role_of(user: Any) -> Role | None:
    """The role of a user by Django's permissions; None for a user who may not look."""
    if not (user.is_active and user.is_staff and user.has_perm("tidemill.view_job")):
        return None
    # A user model of the project needs no ``has_perms``, as for the admin.
    if all(map(user.has_perm, _ADMIN)):
        return Role.ADMIN
    return Role.OPERATOR if all(map(user.has_perm, _OPERATOR)) else Role.VIEWER


def view(request: Any, path: str = "") -> Any:
    """Answer one request to the dashboard."""
    user: Any = getattr(request, "user", None)
    role = role_of(user) if user is not None else None
    if role is None and not path.startswith("static/"):
        if user is not None and user.is_authenticated:
            return HttpResponse(b"You may not look at jobs.", status=403, content_type="text/plain")
        return redirect_to_login(request.get_full_path(), _login_url())
    name = user.get_username() if user is not None and role is not None else ""
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not length.isdigit() or int(length) > MOST_BODY:
        return HttpResponse(b"The form is too large.", status=413, content_type="text/plain")
    body = request.body if request.method == "POST" else b""
    viewer = User(name, role or Role.VIEWER)
    answer = dashboard().handle(_scope(request, path), viewer, body)
    return _response(answer, isinstance(request, ASGIRequest))


def _login_url() -> str:
    try:
        return str(reverse("admin:login"))
    except NoReverseMatch:
        return str(settings.LOGIN_URL)


def _scope(request: Any, path: str) -> Scope:
    root = request.path[: len(request.path) - len(path) - 1]
    scope = scope_of(request.META)
    return {**scope, "root_path": root, "path": f"{root}/{path}", "scheme": request.scheme}


def _response(answer: Response, is_async: bool) -> Any:
    response: Any
    if is_async and isinstance(answer, LongResponse):
        response = StreamingHttpResponse(_in_thread(answer.parts), status=answer.status_code)
    elif isinstance(answer, LongResponse):
        response = StreamingHttpResponse(parts_of(answer), status=answer.status_code)
    else:
        response = HttpResponse(bytes(answer.body), status=answer.status_code)
    del response.headers["Content-Type"]
    for name, value in answer.headers.items():
        if name == "set-cookie":
            response.cookies.load(value)
        else:
            response.headers[name] = value
    return response


async def _in_thread(parts: Generator[bytes]) -> AsyncGenerator[bytes]:
    """Parts that the thread of the request makes, because Django closes its connections.

    From a plain generator, Django would collect all parts before it sends the first part.
    """
    try:
        while (part := await sync_to_async(lambda: next(parts, None))()) is not None:
            if part:
                yield part
    finally:
        await sync_to_async(parts.close)()


_view: Any = csrf_exempt(view)  # the dashboard checks the origin of its forms
for _alias in settings.DATABASES:  # writes of the dashboard must not join ATOMIC_REQUESTS
    _view = transaction.non_atomic_requests(using=_alias)(_view)
urls = ([re_path(r"^(?P<path>.*)$", _view, name="dashboard")], "tidemill", "tidemill")
