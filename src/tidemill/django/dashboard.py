"""The dashboard under a URL of the project: ``path("tidemill/", tidemill.django.dashboard.urls)``.

Staff users who may view jobs are viewers. Viewers who may change and delete jobs, and change queues
and schedules, are operators. Operators who may also delete queues and schedules are admins. A user
who is not logged in gets the login page; other users are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.handlers.asgi import ASGIRequest
from django.db import transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import NoReverseMatch, re_path, reverse
from django.views.decorators.csrf import csrf_exempt

from tidemill.core.errors import InvalidOption
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.long_body import PartsFromThread, filled
from tidemill.dashboard.request import MOST_BODY, Request
from tidemill.dashboard.response import Response
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
    return Dashboard(project_mill(), secret=secret, live="poll")


def role_of(user: Any) -> Role | None:
    """The role of a user by Django's permissions; None for a user who may not look."""
    if not (user.is_active and user.is_staff and user.has_perm("tidemill.view_job")):
        return None
    if user.has_perms(_ADMIN):
        return Role.ADMIN
    return Role.OPERATOR if user.has_perms(_OPERATOR) else Role.VIEWER


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
    try:
        answer = dashboard().handle(_request(request, path, User(name, role or Role.VIEWER)))
    except InvalidOption as error:
        return HttpResponse(str(error).encode(), status=400, content_type="text/plain")
    return _response(answer, isinstance(request, ASGIRequest))


def _login_url() -> str:
    """The URL of the admin's login page, if the project has the admin."""
    try:
        return str(reverse("admin:login"))
    except NoReverseMatch:
        return str(settings.LOGIN_URL)


def _request(request: Any, path: str, user: User) -> Request:
    headers = {name.lower(): str(value) for name, value in request.headers.items()}
    headers.setdefault("content-type", request.META.get("CONTENT_TYPE", ""))
    root = request.path[: len(request.path) - len(path) - 1]
    return Request(
        str(request.method),
        f"/{path}",
        request.META.get("QUERY_STRING", ""),
        request.body if request.method == "POST" else b"",
        headers=headers,
        root=root,
        user=user,
        secure=request.is_secure(),
    )


def _response(answer: Response, is_async: bool) -> Any:
    response: Any
    if isinstance(answer.body, bytes):
        response = HttpResponse(answer.body, status=answer.status)
    else:  # under ASGI, Django would first collect all parts of a plain iterator
        parts = answer.parts()
        body: Any = PartsFromThread(parts, _in_thread) if is_async else filled(parts)
        response = StreamingHttpResponse(body, status=answer.status)
    del response.headers["Content-Type"]
    cookies = []
    for name, value in answer.headers:
        if name.lower() == "set-cookie":
            cookies.append(value)
        else:
            response.headers[name] = value
    for cookie in cookies:
        response.cookies.load(cookie)
    return response


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Make a call in the thread of the request, because Django closes that thread's connections."""
    return await sync_to_async(function)()


_view: Any = csrf_exempt(view)  # the forms have the dashboard's own token
for _alias in settings.DATABASES:  # writes of the dashboard must not join ATOMIC_REQUESTS
    _view = transaction.non_atomic_requests(using=_alias)(_view)
urls = ([re_path(r"^(?P<path>.*)$", _view, name="dashboard")], "tidemill", "tidemill")
