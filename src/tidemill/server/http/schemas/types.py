"""The types of fields in requests and answers.

``extra_json_schema`` is for the OpenAPI description only. The code behind the endpoints checks the
same rules, with better messages.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from msgspec import Meta

from tidemill.core.config import LATEST, MAX_SECONDS


def says(text: str) -> Meta:
    """The description of a field, where name and type do not suffice."""
    return Meta(description=text)


# -- texts ----------------------------------------------------------------------------------------

NOT_BLANK = r"\S"
_BARRED = r"\x00-\x1f\x7f-\xa0\xad"  # of Latin-1 only; the rest of Unicode would fill a page
NAME = rf"^ *[^ {_BARRED}][^{_BARRED}]*$"
"""The pattern of a name in the description. The server refuses further characters."""

_WORD = rf"[^.*#{_BARRED}]+"
TOPIC = rf"^ *[^ .*#{_BARRED}][^.*#{_BARRED}]*(\.{_WORD})*$"
"""The pattern of a topic in the description: words between single dots, without wildcards."""

BINDING = rf"^([*#]| *[^ .*#{_BARRED}][^.*#{_BARRED}]*)(\.([*#]|{_WORD}))*$"
"""The pattern of a binding's pattern: words between single dots, each of them may be a wildcard."""

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        pattern=NOT_BLANK,
        description="A name: at most 200 bytes of UTF-8, without control or invisible characters",
        extra_json_schema={"format": "name"},
    ),
]

_DECIMAL = r"(0\.(0[1-9]|[1-9])[0-9]{{0,7}}|[1-9][0-9]{{0,{more}}}(\.[0-9]{{1,9}})?)"
"""A number of at least 0.01, with up to ``more`` digits after its first digit."""

_SECONDS, _MINUTES, _HOURS, _DAYS = (_DECIMAL.format(more=more) for more in (8, 6, 4, 3))
_PER = f"(({_SECONDS})?s|({_MINUTES})?m|({_HOURS})?h|({_DAYS})?d)"
RATE = rf"^[0-9]{{1,9}}(\.[0-9]{{1,9}})?/{_PER}$"
WINDOW = f"^[1-9][0-9]{{0,8}}/{_PER}$"
Rate = Annotated[str, Meta(extra_json_schema={"pattern": RATE, "examples": ["10/s", "100/m"]})]
Window = Annotated[str, Meta(extra_json_schema={"pattern": WINDOW, "examples": ["100/m"]})]

_ELAPSED = f"(({_SECONDS})? *second|({_MINUTES})? *minute|({_HOURS})? *hour)"
_CALENDAR = "([1-9][0-9]{0,3}|10000)? *(day|week|month|year)"
EVERY = f"^ *({_ELAPSED}|{_CALENDAR})s? *$"
Every = Annotated[str, Meta(extra_json_schema={"pattern": EVERY, "examples": ["15 minutes"]})]

_ALIAS = "@(yearly|annually|monthly|weekly|daily|midnight|hourly)"
CRON = rf"^\s*({_ALIAS}|\S+(\s+\S+){{4,5}})\s*$"
Cron = Annotated[
    str, Meta(extra_json_schema={"pattern": CRON, "format": "cron", "examples": ["0 6 * * 1-5"]})
]
ZONE = "^[A-Za-z0-9_+/-]+$"
Zone = Annotated[
    str, Meta(extra_json_schema={"pattern": ZONE, "format": "zone", "examples": ["Europe/Berlin"]})
]

# -- times and numbers ----------------------------------------------------------------------------

_SOON = "197[1-9]|19[89][0-9]"
_YEARS = f"^({_SOON}|[2-5][0-9]{{3}}|6[0-2][0-9]{{2}}|63[01][0-9]|632[0-4])-"
_LATE = f"^({_SOON}|[2-9][0-9]{{3}})-"
_LOCAL = {
    "format": "local-date-time",
    "pattern": r"-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?$",
}


def _with_zone(years: str) -> dict[str, str]:
    return {"format": "date-time", "pattern": years}


def _any_zone(years: str) -> dict[str, Any]:
    """A time with its zone, or a local time in the zone of the field ``zone``."""
    return {"pattern": years, "anyOf": [_with_zone(years), _LOCAL]}


Moment = Annotated[dt.datetime, Meta(extra_json_schema=_with_zone(_YEARS))]
LocalMoment = Annotated[dt.datetime, Meta(extra_json_schema=_any_zone(_YEARS))]
LocalEnd = Annotated[dt.datetime, Meta(extra_json_schema=_any_zone(_LATE))]
Epoch = Annotated[
    float, Meta(extra_json_schema={"exclusiveMinimum": 0, "exclusiveMaximum": LATEST})
]
Interval = Annotated[float, Meta(extra_json_schema={"minimum": 0.01, "maximum": MAX_SECONDS})]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Priority = Annotated[float, Meta(ge=-100, le=100)]

# Whole numbers are declared as float: a client may send 3 as 3.0, and msgspec refuses 3.0 as int.
Count = Annotated[float, Meta(ge=1, le=10_000, multiple_of=1)]
Thousand = Annotated[float, Meta(ge=1, le=1000, multiple_of=1)]
Retries = Annotated[float, Meta(ge=0, le=65_000, multiple_of=1)]
Bound = Annotated[float, Meta(ge=0, le=2**31 - 1, multiple_of=1)]
Positive = Annotated[float, Meta(ge=1, le=2**31 - 1, multiple_of=1)]

MostReserved = Annotated[Thousand, Meta(description="the most jobs to reserve")]
Conflict = Literal["keep", "reject", "replace", "merge"]
Encoding = Literal["json", "base64"]
OutEncoding = Literal["json", "base64", "repr", "hidden"]
StateName = Literal[
    "waiting", "scheduled", "ready", "running", "succeeded", "failed", "cancelled", "expired"
]

LONGEST_POLL = 300.0  # the longest long poll, in seconds

FirstWait = Annotated[
    float, Meta(ge=0, le=LONGEST_POLL, description="seconds to wait for the first job")
]
Order = Annotated[
    Literal["strict", "fair", "merged"],
    Meta(
        description="strict: all jobs of the first queue before the second; fair: the queues take "
        "turns; merged: by priority and age over all queues"
    ),
]
