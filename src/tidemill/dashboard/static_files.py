"""Static files: styles, scripts and icons, with a long cache."""

from __future__ import annotations

import functools
import hashlib
import mimetypes
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, Response

from tidemill.dashboard.routes import Routes

if TYPE_CHECKING:
    from tidemill.dashboard.page import Page

routes = Routes()

_FOLDER = (Path(__file__).parent / "static").resolve()
_MEDIA = {".js": "text/javascript", ".css": "text/css"}
_FOREVER = "public, max-age=31536000, immutable"


@functools.lru_cache(maxsize=64)
def _read(name: str) -> tuple[bytes, str] | None:
    """The bytes and the version of a file; None when no file has this name."""
    path = (_FOLDER / name).resolve()
    if not path.is_relative_to(_FOLDER) or not path.is_file():
        return None
    data = path.read_bytes()
    return data, hashlib.sha256(data).hexdigest()[:16]


def version_of(name: str) -> str:
    """The version in the URL of a static file, which changes with its bytes."""
    found = _read(name)
    assert found is not None, name
    return found[1]


@routes.get("/static/{name:path}", role=None)
def static_file(page: Page, name: str) -> Response:
    """A static file. A browser keeps the file of a URL with its version."""
    found = _read(name) if len(name) < 100 and name.isprintable() else None
    if found is None:
        return PlainTextResponse("there is no such file", 404)
    data, version = found
    cache = _FOREVER if page.request.arg("v") == version else "no-cache"
    media = _MEDIA.get(Path(name).suffix) or mimetypes.guess_type(name)[0]
    return Response(data, headers={"cache-control": cache}, media_type=media)
