"""Messages: put and reserve them. They are settled in :mod:`.reservations`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from tidemill.brokers.contract.exchange import Mode
from tidemill.brokers.contract.features import Feature
from tidemill.client.context import job_name
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope, priority_of
from tidemill.core.job import Outcome, Verdict
from tidemill.core.retry import Fail, Skip, Snooze
from tidemill.core.signatures import hands_on, refusal, sign_handed_on
from tidemill.errors import CodecError
from tidemill.server.delivery import deliver
from tidemill.server.http.api.jobs import options_of, placed
from tidemill.server.http.bodies import body_out, check_json
from tidemill.server.http.endpoints import Call, Endpoint, Raw, json_of
from tidemill.server.http.exchange import SMALL, ClientGone
from tidemill.server.http.problems import Problem
from tidemill.server.http.queue_permissions import check_put, check_queues
from tidemill.server.http.receipts import receipt_of
from tidemill.server.http.schemas.jobs import MessageOptions, Placed
from tidemill.server.http.schemas.reservations import Reserved, ReservedMany, ReserveIn
from tidemill.server.shared_owner import SharedOwner
from tidemill.server.waiters import ANSWER_BYTES, ReservedJob, size_of

log = logging.getLogger("tidemill.server")


async def put_message(call: Call, queue: str, query: MessageOptions, body: Raw) -> Placed:
    """Put the request's body as a message: JSON if its Content-Type is JSON, else bytes.

    Options are query parameters: ``?delay=60&priority=5``.
    """

    def make() -> Envelope:
        return call.backend.queue(queue).envelope(value_of(body), **options_of(query))

    envelope = await call.compute(make, len(body.data))
    check_put(call.exchange, [envelope], [query])
    (put,) = await call.backend.put([envelope])
    return placed(call, put)


def value_of(body: Raw) -> Any:
    """The message in a body: JSON if its Content-Type is JSON, else bytes."""
    kind = body.content_type.partition(";")[0].strip().lower()
    if kind in ("application/x-www-form-urlencoded", "multipart/form-data"):
        raise Problem(
            "unsupported-media-type",
            "the Content-Type of a message must be application/json, as curl --json sends it, or "
            "application/octet-stream",
        )
    if kind == "application/json" or kind.endswith("+json"):
        check_json(len(body.data))
        return json_of(body.data)
    return body.data


async def reserve(call: Call, body: ReserveIn) -> ReservedMany:
    """Reserve messages; wait up to ``timeout`` seconds for the first message.

    Each message is reserved until its ttr is over. Settle it with its receipt before that.
    """
    shared_owner = call.backend.shared_owner

    def encode(job: ReservedJob) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(_reserved(call, job)))

    # The answers are encoded messages, which encode as Reserved does.
    return ReservedMany(await hand_over(call, shared_owner, body, encode))  # type: ignore[arg-type]


async def hand_over(
    call: Call,
    shared_owner: SharedOwner,
    body: ReserveIn,
    encode: Callable[[ReservedJob], msgspec.Raw],
) -> list[msgspec.Raw]:
    """Reserve jobs, and return them in JSON. A job that cannot be decoded fails, or is released."""
    backend, exchange = call.backend, call.exchange
    queues = [check_name("queue", name) for name in dict.fromkeys(body.queues)]
    check_queues(exchange, queues)
    mode = Mode(body.order)
    if mode is Mode.MERGED:
        backend.mill.runtime.features.need(Feature.MERGED, "order merged")
    timeout = min(body.timeout, backend.settings.longest_poll)
    exchange.leaving()  # a client that has left gets no jobs
    work = shared_owner.reserve(queues, int(body.count), timeout, mode)
    found = await backend.poll(exchange, work, []) if timeout else await work
    # Jobs are encoded before a message is acknowledged: an unreadable message must not be lost.
    try:
        size = sum(size_of(job.lease) for job in found)
        if size > SMALL:
            exchange.hold(size)
        if any(job.envelope.links is not None for job in found):  # the results of parents are read
            shown = await backend.run(_shown, call, found, encode)
        else:
            shown = await call.compute(lambda: _shown(call, found, encode), size)
    except BaseException:
        shared_owner.give_all_back(found)
        raise
    for verdict in shown.refused:
        shared_owner.settle_later(verdict)
    shared_owner.give_all_back(found[shown.seen :])
    usable = [job for job in found if job.lease.token in shown.jobs]
    delivered = await deliver(shared_owner, usable, lambda: exchange.has_left)
    if exchange.has_left:
        raise ClientGone
    return [shown.jobs[job.lease.token] for job in delivered]


class _Shown(NamedTuple):
    """The first ``seen`` jobs: in JSON by their tokens, or with verdicts that refuse them."""

    jobs: dict[int, msgspec.Raw]
    refused: list[Verdict]
    seen: int


def _shown(
    call: Call, found: Sequence[ReservedJob], encode: Callable[[ReservedJob], msgspec.Raw]
) -> _Shown:
    """Encode jobs until the answer is large enough: the results of parents may be large."""
    jobs: dict[int, msgspec.Raw] = {}
    refused: list[Verdict] = []
    left = ANSWER_BYTES
    for n, job in enumerate(found):
        if left <= 0:
            return _Shown(jobs, refused, n)
        token, it = job.lease.token, job.envelope
        try:
            jobs[token] = encode(job)
            left -= len(memoryview(jobs[token]))
        except (CodecError, Fail) as error:
            name = job_name(it) if it.task else f"message {it.id}"
            log.warning("%s of queue %s: %s", name, it.queue, error)
            refused.append(refusal(job.lease, error))
        except Snooze as error:
            refused.append(Verdict(token, Outcome.SNOOZE, delay=error.delay, error=str(error)))
        except Skip:
            skipped = Verdict(token, Outcome.SUCCESS)
            if hands_on(it):
                sign_handed_on(skipped, it.id, call.backend.mill.runtime.keys)
            refused.append(skipped)
    return _Shown(jobs, refused, len(found))


def _reserved(call: Call, job: ReservedJob) -> Reserved:
    backend, lease, envelope = call.backend, job.lease, job.envelope
    receipt = receipt_of(backend.shared_owner.owner.id, lease.token, once=envelope.at_most_once)
    body, encoding = body_out(backend.mill, envelope)
    return Reserved(
        receipt=call.sealed(receipt),
        id=envelope.id,
        queue=envelope.queue,
        body=body,
        encoding=encoding,  # type: ignore[arg-type]  # one of the three encodings
        attempt=lease.attempt,
        ttr=None if envelope.at_most_once else lease.deadline,
        created=envelope.created,
        priority=priority_of(lease.rank),
        key=envelope.key or None,
        tags=list(envelope.tags),
        headers=envelope.headers,
    )


ENDPOINTS = (
    Endpoint("POST", "/v1/queues/{queue}/messages", put_message, status=201, also=(200, 409, 507)),
    Endpoint("POST", "/v1/reserve", reserve, checks_queues=True),
)
