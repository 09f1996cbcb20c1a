"""Problems: errors in the form that clients see (``application/problem+json``, RFC 9457).

The type of an exception decides the kind of the problem, and its message is the detail. An
unexpected exception becomes a 500 without its text; the log has it under the id of the request.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tidemill import errors
from tidemill.client.queues import QueueHasJobs
from tidemill.core.codec import BodyTooLarge
from tidemill.server.http.validation_errors import validation_message


class Kind(msgspec.Struct, frozen=True):
    """A kind of problem: its HTTP status and its title, the same for all problems of the kind."""

    status: int
    title: str


KINDS = {
    "invalid-request": Kind(400, "The request is invalid"),
    "unauthorized": Kind(401, "The token is missing or invalid"),
    "forbidden": Kind(403, "The client may not do this"),
    "not-found": Kind(404, "Not found"),
    "method-not-allowed": Kind(405, "The path does not have this method"),
    "timeout": Kind(408, "The request came too slowly"),
    "conflict": Kind(409, "The request conflicts with the current state"),
    "queue-has-jobs": Kind(409, "The queue has jobs"),
    "lease-lost": Kind(409, "The reservation has ended"),
    "already-settled": Kind(409, "The receipt was used before"),
    "at-most-once": Kind(409, "The message was acknowledged when it was delivered"),
    "gone": Kind(410, "The job is no longer kept"),
    "too-large": Kind(413, "The request is too large"),
    "unsupported-media-type": Kind(415, "The type of the body is not supported"),
    "queue-full": Kind(429, "The queue is full"),
    "too-many-requests": Kind(429, "Too many requests"),
    "error": Kind(500, "The server failed"),
    "feature-missing": Kind(501, "The broker does not have this feature"),
    "unavailable": Kind(503, "The store is not available"),
    "busy": Kind(503, "The server is too busy"),
    "store-full": Kind(507, "The store is full"),
}
"""All kinds, by the last part of the problem's ``type``."""

PREFIX = "urn:tidemill:problem:"


class ProblemBody(msgspec.Struct, omit_defaults=True):
    """An error (RFC 9457): ``type`` is for programs, ``detail`` is a sentence for people."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str = ""
    job_id: str = ""


class Problem(Exception):
    """Ends a request with an error. ``headers`` are added to the answer."""

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
        return KINDS[self.kind].status

    def body(self, request_id: str) -> bytes:
        kind = KINDS[self.kind]
        return msgspec.json.encode(
            ProblemBody(
                PREFIX + self.kind, kind.title, kind.status, self.detail, request_id, self.job_id
            )
        )


def not_allowed(methods: Collection[str]) -> Problem:
    known = {*methods, *({"HEAD"} if "GET" in methods else ())}
    allow = ", ".join(sorted(known))
    return Problem(
        "method-not-allowed", f"this path has the methods {allow}", headers={"allow": allow}
    )


_OF_ERRORS: tuple[tuple[type[errors.TidemillError], str], ...] = (  # the first fitting type counts
    (errors.JobPruned, "gone"),
    (errors.JobNotFound, "not-found"),
    (errors.ScheduleNotFound, "not-found"),
    (errors.TaskNotFound, "not-found"),
    (errors.Unroutable, "not-found"),
    (errors.ScheduleExists, "conflict"),
    (errors.ScheduleOver, "conflict"),
    (errors.DuplicateJob, "conflict"),
    (errors.QueueFull, "queue-full"),
    (errors.StoreFull, "store-full"),
    (errors.StoreMoved, "unavailable"),
    (errors.LeaseLost, "lease-lost"),
    (QueueHasJobs, "queue-has-jobs"),
    (errors.BrokerUnavailable, "unavailable"),
    (errors.FeatureMissing, "feature-missing"),
    (BodyTooLarge, "too-large"),
    (errors.InvalidOption, "invalid-request"),
    (errors.CodecError, "invalid-request"),
)


def problem_of(error: Exception) -> Problem | None:
    if isinstance(error, Problem):
        return error
    if isinstance(error, msgspec.MsgspecError):
        return Problem("invalid-request", validation_message(error))
    if isinstance(error, RecursionError):
        return Problem("invalid-request", "the body is nested too deeply")
    for kind, name in _OF_ERRORS:
        if isinstance(error, kind):
            job_id = error.job_id if isinstance(error, errors.DuplicateJob) else ""
            return Problem(name, str(error), job_id=job_id)
    return None
