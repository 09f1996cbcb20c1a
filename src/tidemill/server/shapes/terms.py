"""What the fields of requests and answers may hold."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from msgspec import Meta

from tidemill.config import MAX_SECONDS

Moment = Annotated[dt.datetime, Meta(extra_json_schema={"format": "date-time"})]
NOT_BLANK = r"\S"
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=NOT_BLANK)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Priority = Annotated[float, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=1, le=10_000)]
Conflict = Literal["keep", "reject", "replace", "merge"]
Encoding = Literal["json", "base64"]
OutEncoding = Literal["json", "base64", "repr"]
StateName = Literal[
    "waiting", "scheduled", "ready", "running", "succeeded", "failed", "cancelled", "expired"
]

LONGEST_POLL = 300.0
"""Seconds a long poll may take."""
