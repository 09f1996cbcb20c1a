"""Schemas of topics in requests and answers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from tidemill.server.http.schemas.types import Epoch, Name, Priority, Retries, Seconds


class PublishQuery(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The options of a publish; all copies have them. ``mandatory``: 404 if no queue is bound."""

    delay: Seconds | None = None
    at: Epoch | None = None
    priority: Priority | None = None
    ttr: Seconds | None = None
    expires: Seconds | None = None
    retries: Retries | None = None
    tags: list[Name] | None = None
    mandatory: bool = False

    def options(self) -> dict[str, Any]:
        """The options that are given, except ``mandatory``."""
        fields = msgspec.structs.asdict(self)
        del fields["mandatory"]
        if self.retries is not None:
            fields["retries"] = int(self.retries)
        return {name: value for name, value in fields.items() if value is not None}


class BindingsOut(Struct):
    """The patterns that a queue is bound to, in order."""

    bindings: list[str]
