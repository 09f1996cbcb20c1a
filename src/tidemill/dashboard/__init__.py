"""The dashboard: pages that show an app's queues, jobs and workers, and act on them.

``tidemill server`` serves the dashboard. Mount it in your own site with :func:`asgi` or
:func:`wsgi`. The function ``user`` returns the user who sent a request::

    site.mount("/jobs", tidemill.dashboard.asgi(mill, user=who))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidemill.app import Tidemill
from tidemill.dashboard.roles import User
from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.dashboard.dashboard import AsgiDashboard, Dashboard, Who, WsgiDashboard

__all__ = ["User", "asgi", "wsgi"]


def asgi(mill: Tidemill, *, user: Who | None, **settings: Any) -> AsgiDashboard:
    """The dashboard as an ASGI application, to mount in Starlette or FastAPI.

    Args:
        mill: the app.
        user: a function of the scope of a request. It returns the :class:`User`, or None for a
            request without a user. It may be async. If this argument is None, everybody who reaches
            the site is an admin.
        settings: see :class:`tidemill.dashboard.dashboard.Dashboard`.

    Raises:
        InvalidOption: a setting is wrong, or a package of ``tidemill[dashboard]`` is missing.
    """
    dashboard = _dashboard(mill, **settings)
    from tidemill.dashboard.dashboard import AsgiDashboard

    return AsgiDashboard(dashboard, user)


def wsgi(
    mill: Tidemill, *, user: Callable[[dict[str, Any]], User | None] | None, **settings: Any
) -> WsgiDashboard:
    """The dashboard as a WSGI application, to mount in Flask or Django; its pages poll.

    Args:
        mill: the app.
        user: a function of the ``environ`` of a request. It returns the :class:`User`, or None for
            a request without a user. If this argument is None, everybody who reaches the site is an
            admin.
        settings: see :class:`tidemill.dashboard.dashboard.Dashboard`.

    Raises:
        InvalidOption: a setting is wrong, or a package of ``tidemill[dashboard]`` is missing.
    """
    dashboard = _dashboard(mill, live="poll", **settings)
    from tidemill.dashboard.dashboard import WsgiDashboard

    return WsgiDashboard(dashboard, user)


def _dashboard(mill: Tidemill, **settings: Any) -> Dashboard:
    try:
        from tidemill.dashboard.dashboard import Dashboard
    except ModuleNotFoundError as error:
        raise InvalidOption(
            f"the dashboard needs {error.name}; install it with: pip install 'tidemill[dashboard]'"
        ) from None
    return Dashboard(mill, **settings)
