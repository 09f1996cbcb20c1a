"""Static files: styles, scripts and icons, with an ETag and a long cache."""

from __future__ import annotations

import functools
import hashlib
import mimetypes
from pathlib import Path

from tidemill.dashboard.request import Request
from tidemill.dashboard.response import Response

_FOLDER = (Path(__file__).parent / "static").resolve()
_MEDIA = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
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


def static_file(request: Request, name: str) -> Response:
    """A static file, or 304 when the browser has it."""
    found = _read(name) if len(name) < 100 and name.isprintable() else None
    if found is None:
        return Response("there is no such file", 404, "text/plain; charset=utf-8")
    data, version = found
    tag = f'"{version}"'
    cache = _FOREVER if request.arg("v") == version else "no-cache"
    headers = {"etag": tag, "cache-control": cache}
    if tag in request.headers.get("if-none-match", ""):
        return Response(b"", 304, headers=headers)
    suffix = Path(name).suffix
    media = _MEDIA.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(data, 200, media, headers)
