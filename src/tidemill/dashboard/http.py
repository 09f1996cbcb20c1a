"""Requests with their forms, long answers such as an export, and static files."""

from __future__ import annotations

import functools
import hashlib
import mimetypes
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tidemill.dashboard.routes import Routes

if TYPE_CHECKING:
    from tidemill.dashboard.page import Page

MOST_BODY = 1 << 20  # the most bytes of a form
_MOST_FIELDS = 2000
_MOST_QUERY = 16_384


class Request(StarletteRequest):
    """One request, whose body was read. Raises HTTPException for a large form or query."""

    def __init__(self, scope: Mapping[str, Any], body: bytes = b"") -> None:
        super().__init__(dict(scope))
        if len(body) > MOST_BODY or body.count(b"&") >= _MOST_FIELDS:
            text = f"the form has more than {MOST_BODY:,} bytes or {_MOST_FIELDS:,} fields"
            raise HTTPException(413, text)
        if len(scope["query_string"]) > _MOST_QUERY:
            raise HTTPException(414, f"the query has more than {_MOST_QUERY:,} characters")
        root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
        if path == root or path.startswith(f"{root}/"):  # some servers leave the root out
            path = path[len(root) :]
        # where the dashboard is mounted, quoted, and the rest of the path, decoded
        self.root, self.path = quote(root, safe="/"), path or "/"
        kind = self.headers.get("content-type", "")
        is_form = kind.startswith("application/x-www-form-urlencoded")
        self.form_data = QueryParams(body.decode("utf-8", "replace") if is_form else "")

    def arg(self, name: str, default: str = "") -> str:
        """The last value of a query parameter, or the default."""
        return self.query_params.get(name, default)

    def field(self, name: str, default: str = "") -> str:
        """The last value of a form field, or the default."""
        return self.form_data.get(name, default)

    @property
    def secure(self) -> bool:
        return bool(self.scope.get("scheme") == "https")

    @property
    def here(self) -> str:
        """The path and query of this request, from the root of the site."""
        query = self.scope["query_string"].decode("latin-1")
        return f"{self.root}{quote(self.path, safe='/~@:+,')}{query and f'?{query}'}"


class LongResponse(StreamingResponse):
    """An answer whose parts are made one at a time, as the reader takes them.

    A generator that searches for data sometimes makes an empty part, and may be closed there.
    """

    def __init__(self, parts: Generator[bytes], headers: Mapping[str, str], media_type: str):
        super().__init__(parts, headers=headers, media_type=media_type)
        self.parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.parts.close()


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
