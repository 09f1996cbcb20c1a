"""Errors as clients see them: ``application/problem+json`` (RFC 9457), one sentence each.

What tidemill raises becomes a problem by its type; the sentence is the error's own, so that it
names the field and says what to do. What nobody foresaw is a 500 without its text, which goes to
the log under the id of the request.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tidemill.config import BodyTooLarge
from tidemill.deletion import QueueHasJobs
from tidemill.errors import (
    BrokerUnavailable,
    CodecError,
    DuplicateJob,
    FeatureMissing,
    InvalidOption,
    JobNotFound,
    JobPruned,
    LeaseLost,
    QueueFull,
    ScheduleExists,
    ScheduleNotFound,
    ScheduleOver,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.server.sentences import sentence_of

__all__ = ["KINDS", "PREFIX", "Kind", "Problem", "ProblemBody", "not_allowed", "problem_of"]


class Kind(msgspec.Struct, frozen=True):
    """A sort of problem: its status and its title, which never change from case to case."""

    status: int
    title: str


KINDS = {
    "invalid-request": Kind(400, "The request cannot be used"),
    "unauthorized": Kind(401, "No valid token was given"),
    "forbidden": Kind(403, "This is not allowed here"),
    "not-found": Kind(404, "There is no such thing"),
    "method-not-allowed": Kind(405, "This cannot be done to it"),
    "timeout": Kind(408, "The request came too slowly"),
    "conflict": Kind(409, "It is there already, and is another"),
    "queue-has-jobs": Kind(409, "The queue has jobs"),
    "lease-lost": Kind(409, "The reservation has ended"),
    "already-settled": Kind(409, "The message was settled with this receipt"),
    "at-most-once": Kind(409, "The message was acknowledged when it was handed out"),
    "gone": Kind(410, "It is no longer kept"),
    "too-large": Kind(413, "The request is too large"),
    "unsupported-media-type": Kind(415, "The body is of no known type"),
    "queue-full": Kind(429, "The queue is full"),
    "too-many-requests": Kind(429, "Too many requests"),
    "head-too-large": Kind(431, "The head of the request is too large"),
    "error": Kind(500, "The server made a mistake"),
    "feature-missing": Kind(501, "The broker cannot do this"),
    "unknown-method": Kind(501, "There is no such method"),
    "unavailable": Kind(503, "The store cannot be reached now"),
    "busy": Kind(503, "The server has too much in hand"),
    "too-many-connections": Kind(503, "Too many connections"),
    "store-full": Kind(507, "The store is full"),
}
"""By the last part of the problem's ``type``."""

PREFIX = "urn:tidemill:problem:"


class ProblemBody(msgspec.Struct, omit_defaults=True):
    """RFC 9457: ``detail`` is a sentence for a person, ``type`` is for programs."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str = ""
    job_id: str = ""


class Problem(Exception):
    """Ends a request with an error. ``headers`` go with the answer."""

    def __init__(
        self, kind: str, detail: str, *, headers: dict[str, str] | None = None, job_id: str = ""
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = headers or {}
        self.job_id = job_id

    @property
    def status(self) -> int:
        """The HTTP status."""
        return KINDS[self.kind].status

    def body(self, request_id: str) -> bytes:
        """The document."""
        kind = KINDS[self.kind]
        return msgspec.json.encode(
            ProblemBody(
                PREFIX + self.kind, kind.title, kind.status, self.detail, request_id, self.job_id
            )
        )


def not_allowed(methods: Collection[str]) -> Problem:
    """Something else was to be done to a path than what it takes."""
    known = {*methods, *({"HEAD"} if "GET" in methods else ())}
    allow = ", ".join(sorted(known))
    return Problem("method-not-allowed", f"the path takes {allow}", headers={"allow": allow})


_OF_ERRORS: tuple[tuple[type[TidemillError], str], ...] = (  # the first that fits
    (JobPruned, "gone"),
    (JobNotFound, "not-found"),
    (ScheduleNotFound, "not-found"),
    (ScheduleExists, "conflict"),
    (ScheduleOver, "conflict"),
    (DuplicateJob, "conflict"),
    (QueueFull, "queue-full"),
    (StoreFull, "store-full"),
    (StoreMoved, "unavailable"),
    (LeaseLost, "lease-lost"),
    (QueueHasJobs, "queue-has-jobs"),
    (BrokerUnavailable, "unavailable"),
    (FeatureMissing, "feature-missing"),
    (BodyTooLarge, "too-large"),
    (InvalidOption, "invalid-request"),
    (CodecError, "invalid-request"),
)


def problem_of(error: Exception) -> Problem | None:
    """The problem that stands for an error; None for one that nobody foresaw."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, msgspec.MsgspecError):
        return Problem("invalid-request", sentence_of(error))
    if isinstance(error, RecursionError):
        return Problem("invalid-request", "the body is nested too deeply")
    for kind, name in _OF_ERRORS:
        if isinstance(error, kind):
            job_id = error.job_id if isinstance(error, DuplicateJob) else ""
            return Problem(name, str(error), job_id=job_id)
    return None
