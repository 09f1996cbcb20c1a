"""Help: keys, search, and roles."""

from __future__ import annotations

from starlette.responses import Response

from tidemill.dashboard.page import Page
from tidemill.dashboard.routes import Routes

routes = Routes()

KEYS = (
    ("/", "search jobs"),
    ("j, k", "move down and up in a list"),
    ("x", "select the row"),
    ("Enter", "open the row"),
    ("r", "retry: the job, or the selected jobs"),
    ("c", "cancel: the job, or the selected jobs"),
    ("e", "edit the job, and run it again"),
    ("p", "pause live news, or go on"),
    ("?", "this page"),
    ("Esc", "leave a field or a dialog"),
)


@routes.get("/help")
def index(page: Page) -> Response:
    """The page of help."""
    return page.render("help.html", title="Help", section="/help", keys=KEYS, still=True)
