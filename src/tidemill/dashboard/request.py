"""A request to the dashboard: Starlette's request, with the form that its body holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest

MOST_BODY = 1 << 20
"""The most bytes of a form."""

_MOST_FIELDS = 2000
_MOST_QUERY = 16_384


class Request(StarletteRequest):
    """One request, whose body has been read.

    Attributes:
        root: the path at which the dashboard is mounted, quoted, without a slash at its end.
        path: the rest of the path, decoded, which begins with a slash.
        form_data: the fields of a form.

    Raises:
        HTTPException: the form or the query is too large.
    """

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
        """True when the browser uses https."""
        return bool(self.scope.get("scheme") == "https")

    @property
    def here(self) -> str:
        """The path and query of this request, from the root of the site."""
        query = self.scope["query_string"].decode("latin-1")
        return f"{self.root}{quote(self.path, safe='/~@:+,')}{query and f'?{query}'}"
