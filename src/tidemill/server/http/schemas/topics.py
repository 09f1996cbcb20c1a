"""Schemas of topics in requests and answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from tidemill.server.http.schemas.jobs import PublishOptions
from tidemill.server.http.schemas.types import says


class PublishQuery(PublishOptions):
    """The options of a publish; all copies have them. ``mandatory``: 404 if no queue is bound."""

    mandatory: Annotated[
        bool, says("refuse the message with 404 when no queue is bound to the topic")
    ] = False

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
