"""Fingerprints of failures: failures with the same fingerprint count as one failure.

A fingerprint is a hash of three facts: the class of the exception, the place in the code that
raised it, and its message. Only the first line of the message counts, without numbers, ids and
quoted values. All three come from the stored texts of an attempt. So a page that shows an attempt
can compute the fingerprint, too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

OTHER = "other"  # the fingerprint of further failures, when there are too many different ones
FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line \d+, in ([^\n]+)$', re.MULTILINE)
"""The first line of a frame in a traceback: its file, and its function."""

_GROUP = re.compile(r"^[ |]*\+-[+-]*- 1 -+$", re.MULTILINE)
"""The line of a traceback after which the exceptions of a group follow."""

_CLASS = re.compile(r"[A-Za-z_][\w.]*(?=: |$)")
_NOT_OURS = re.compile(r"[/\\](?:site-packages|dist-packages|python\d[\w.]*)(?=[/\\])|^<")
_VALUES = re.compile(
    r""" "[^"]*" | '[^']*' | `[^`]*`          # quoted values
       | \b [a-z]+ :// [^\s'"]+               # addresses of pages
       | [^\s'"<>]+ @ [^\s'"<>]+             # addresses of mail
       | (?<! \w) (?: / [^\s'"/:]+ ){2,}      # paths of files
       | \b [0-9a-fA-F]{8,} \b                # ids, also the parts of a UUID
       | \b 0x [0-9a-fA-F]+ \b                # addresses in memory
       | \d+ (?: [.,:_-] \d+ )*               # numbers, times and versions
    """,
    re.VERBOSE,
)
_TIDEMILL = str(Path(__file__).parent.parent) + os.sep
_MESSAGE_MOST = 500  # the most characters of an error that count for its fingerprint


class Failure(NamedTuple):
    """The identity of a failure.

    Attributes:
        fingerprint: 16 hexadecimal digits.
        error: the class of the exception; empty when the failure has no exception.
        message: the first line of the message, with its numbers, ids and quoted values.
        place: ``file:function`` of the innermost frame of the user's code; empty without a frame.
    """

    fingerprint: str
    error: str
    message: str
    place: str


class FailureSample(msgspec.Struct, frozen=True):
    """The latest failure with one fingerprint, as a row of history keeps it.

    Attributes:
        error, message, place: see :class:`Failure`.
        traceback: the end of the traceback.
        job, queue, task: the job that failed.
        worker, host: the worker that ran the job, and its machine.
        time: the wall time of the failure.
    """

    error: str = ""
    message: str = ""
    place: str = ""
    traceback: str = ""
    job: str = ""
    queue: str = ""
    task: str = ""
    worker: str = ""
    host: str = ""
    time: float = 0.0


def failure_of(error: str, traceback: str = "") -> Failure:
    import hashlib

    line = error.partition("\n")[0][:_MESSAGE_MOST]
    found = _CLASS.match(line)
    name = found.group() if found else ""
    message = line[len(name) :].removeprefix(": ")
    place = place_of(traceback)
    identity = "\n".join((name, place, shape_of(message)))
    return Failure(hashlib.sha256(identity.encode()).hexdigest()[:16], name, message, place)


def place_of(traceback: str) -> str:
    """``file:function`` of the innermost frame of the user's code in a traceback.

    Without such a frame, the result is the innermost frame. ``file`` has its folder, but not the
    whole path: another release of the code may be installed in another place.
    """
    group = _GROUP.search(traceback)
    frames = FRAME.findall(traceback[: group.start()] if group else traceback)
    ours = [frame for frame in frames if not _NOT_OURS.search(frame[0])]
    if not frames:
        return ""
    file, function = (ours or frames)[-1]
    parts = file.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-2:])}:{function}"


def package_of(file: str) -> str:
    """The package of a file of a traceback; empty for a file of the user's code."""
    found = [*_NOT_OURS.finditer(file)]
    if file.startswith(_TIDEMILL):
        return "tidemill"
    if not found or file.startswith("<"):
        return file if found else ""
    return re.split(r"[/\\]", file[found[-1].end() + 1 :])[0].removesuffix(".py")


def shape_of(message: str) -> str:
    """A message without the values that differ from one failure to the next."""
    return " ".join(_VALUES.sub("…", message).split())
