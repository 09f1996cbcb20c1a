"""The life of a job as spans of time: its waits by cause, its runs, its backoffs.

A store records when an attempt was leased, started and ended. It does not record why a job waited
between attempts. If the record or the present state of the store shows the cause, the span names
the cause. If not, ``known`` is False, and the span names possible causes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tidemill.client.explain import attempt_text, is_stuck, with_interrupted_runs
from tidemill.core.job import CANCEL_ASKED, GROUP, Attempt, Outcome, Record, State, was_held

LEAST = 0.001  # seconds; a shorter gap is no span
WIDTH = 1000.0  # the width of a drawing in its own units
LEAST_BAR = 4.0  # the least width of a bar, so that people can see it
_FOLD = 0.75  # a wait that fills more than this part of the whole is drawn shorter

_STATES = {
    Outcome.SUCCESS: "succeeded",
    Outcome.RETRY: "failed",
    Outcome.FAIL: "failed",
    Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired",
    Outcome.RELEASE: "interrupted",
}


class Span(msgspec.Struct, frozen=True):
    """A part of a job's life. Times are wall time in seconds."""

    kind: str  # ``delay jobs key limit paused no-worker wait backoff rest prefetch run stop``
    start: float
    end: float  # of an open span: the present time, or its known end
    label: str  # what the job did or waited for
    detail: str = ""  # further words, such as the worker or the error
    state: str = ""  # how a run ended; empty for waits and open runs
    is_open: bool = False  # the job is in this span now
    known: bool = True  # False when the store does not know the cause

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.start)


class Cause(msgspec.Struct, frozen=True):
    """Why a ready job waits at this moment: the kind of a span, a label, and a sentence."""

    kind: str
    label: str
    detail: str = ""


class Known(msgspec.Struct, frozen=True):
    """Facts about a job besides its record."""

    now: float  # the wall time of the look
    cause: Cause | None = None  # why a ready job waits now
    started: float = 0.0  # when the present run began; 0 if unknown
    parents: Sequence[Record] = ()  # the jobs that this job waits or waited for, if still kept


def spans_of(record: Record, known: Known) -> list[Span]:
    """The spans of a job, in order. Gaps between them are shorter than :data:`LEAST`."""
    record = with_interrupted_runs(record)
    spans = list(_before(record, known))
    for number, attempt in enumerate(record.attempts):
        if number:
            spans += _between(record, record.attempts[number - 1], attempt)
        spans += _attempt(record, attempt)
    spans += _present(record, known)
    return [span for span in spans if span.seconds >= LEAST or span.is_open or span.state]


# -- before the first attempt --------------------------------------------------------------------


def _before(record: Record, known: Known) -> Iterator[Span]:
    """The waits until the first lease, or until now."""
    first, is_over = _first_lease(record), True
    if not first:
        first, is_over = record.finished or known.now, bool(record.finished)
    at, envelope = record.envelope.created, record.envelope
    earliest = record.attempts[0] if record.attempts else None
    if earliest is not None and (earliest.number > 1 or earliest.run > 1):
        text = f"earlier attempts, of which the store keeps {len(record.attempts)}"
        yield Span("wait", at, first, text, known=False)
        return
    if envelope.links is not None and envelope.links.waits:
        span = _for_jobs(record, known, at, first, is_over)
        yield span
        if not span.known or span.is_open:
            return
        at = span.end
    elif record.state is State.WAITING:
        yield Span("key", at, first, f"waits for the job with key {envelope.key}", is_open=True)
        return
    due = max(at + envelope.delay if envelope.delay else 0.0, envelope.at)
    if record.state is State.SCHEDULED and not record.attempts:
        yield Span("delay", at, max(record.due, first), "not due", record.error, is_open=True)
    elif due > at:
        end = min(due, first)
        yield Span("delay", at, end, "not due", "it was put to start later")
        yield from _for_start(record, known, end, first, is_over)
    else:
        yield from _for_start(record, known, at, first, is_over)


def _first_lease(record: Record) -> float:
    """When a worker first got the job; 0 for a job that no worker has had."""
    if record.attempts:
        return record.attempts[0].leased or record.attempts[0].started
    return record.leased if record.state is State.RUNNING else 0.0


def _for_jobs(record: Record, known: Known, at: float, first: float, is_over: bool) -> Span:
    """The wait of a job for the earlier jobs of its chain, group or flow."""
    links = record.envelope.links
    assert links is not None
    count = max(len(links.inputs), len(known.parents)) or record.pending
    label = "members run" if record.envelope.task == GROUP else "waits for jobs before it"
    if record.state is State.WAITING:
        have = "has" if record.pending == 1 else "have"
        text = f"{record.pending:,} of them {have} not ended"
        return Span("jobs", at, first, label, text, is_open=True)
    ends = [parent.finished for parent in known.parents if parent.finished]
    if ends and len(ends) >= count:
        return Span("jobs", at, min(max(at, *ends), first), label)
    if record.envelope.task == GROUP or (is_over and not record.attempts):
        return Span("jobs", at, first, label)
    text = "the jobs before it are no longer kept, so nobody knows when they ended"
    if not links.inputs and not known.parents:
        text = "the store did not find the jobs before it"
    return Span("jobs", at, first, f"{label}, then to start", text, known=False)


def _for_start(
    record: Record, known: Known, start: float, end: float, is_over: bool
) -> Iterator[Span]:
    """The wait of a ready job. The cause is known only while the wait lasts."""
    if not is_over and record.state is State.READY and known.cause is not None:
        cause = known.cause
        yield Span(cause.kind, start, end, cause.label, cause.detail, is_open=True)
    elif end > start:
        yield Span("wait", start, end, "waits to start", _may_be(record), known=end - start < 0.05)


def _may_be(record: Record) -> str:
    """The possible causes of a past wait: stores do not record the cause."""
    limit = record.envelope.limit
    causes = ["a free slot"]
    if limit is not None:
        causes.append(f"its limit {limit.name}{f' for key {limit.key}' if limit.key else ''}")
    causes += ["a worker", "the end of a pause"]
    return f"for {', '.join(causes[:-1])} or {causes[-1]}"


# -- attempts ------------------------------------------------------------------------------------


def _attempt(record: Record, attempt: Attempt) -> Iterator[Span]:
    """One lease: the wait at the worker, the run, and the rest of a run that was asked to stop."""
    if record.envelope.is_message or not attempt.started:
        start = attempt.leased or attempt.ended
        label = "held by its consumer" if record.envelope.is_message else "at the worker, not begun"
        label = label if attempt.number else "at the worker, until the worker was lost"
    else:
        if attempt.leased and attempt.started > attempt.leased:
            yield Span(
                "prefetch", attempt.leased, attempt.started, "at the worker, before its slot",
                attempt.worker,
            )  # fmt: skip
        start, label = attempt.started, attempt_text(record, attempt.run, attempt.number)
    outcome = record.outcome_of(attempt)
    detail = f"{attempt.worker}: {attempt.error}" if attempt.error else attempt.worker
    state = _STATES.get(outcome, "")
    yield from _run(record, Span("run", start, max(start, attempt.ended), label, detail, state))


def _run(record: Record, run: Span) -> Iterator[Span]:
    """A run. If somebody asked to stop it, two spans: until the request, and until the end."""
    asked = [when for when, line in record.log if line in CANCEL_ASKED.values()]
    when = next((when for when in asked if run.start <= when <= run.end), 0.0)
    if not when:
        yield run
        return
    yield msgspec.structs.replace(run, end=when, state="", is_open=False)
    ended = "still runs" if run.is_open else f"interrupted, {run.state or 'ended'}"
    label = f"asked to stop; {ended}"
    yield msgspec.structs.replace(run, kind="stop", start=when, label=label)


def _between(record: Record, before: Attempt, after: Attempt) -> Iterator[Span]:
    start, end = before.ended or before.leased, after.leased or after.started
    if end <= start:
        return
    if after.run > before.run:
        yield Span("rest", start, end, "at rest, until somebody retried it and it started")
        return
    if before.outcome == Outcome.RELEASE:
        yield Span("wait", start, end, "waits to start", _may_be(record), known=end - start < 0.05)
        return
    text = f"backoff until it was due, then {_may_be(record)}"
    yield Span("backoff", start, end, "backoff, then waits to start", text, known=False)


# -- now -----------------------------------------------------------------------------------------


def _present(record: Record, known: Known) -> Iterator[Span]:
    """The span in which a job with attempts is now, or the present run."""
    last = record.attempts[-1] if record.attempts else None
    if record.state is State.RUNNING:
        if not was_held(record.attempts, record.leased):
            if last is not None:
                lease = Attempt(0, record.worker, record.leased, 0.0, 0.0, 0, run=record.run)
                yield from _between(record, last, lease)
            yield from _running(record, known)
        elif is_stuck(record) and last is not None:
            label = "stuck, until its process is killed"
            yield Span("stop", last.ended, known.now, label, record.worker, is_open=True)
    elif last is not None and record.state is State.SCHEDULED:
        label = f"backoff before attempt {record.attempt + 1}" if record.attempt else "not due"
        until = max(record.due, known.now)
        yield Span("backoff", last.ended, until, label, record.error, is_open=True)
    elif last is not None and record.state is State.READY:
        start = last.ended
        if start < record.due <= known.now:
            yield Span("backoff", start, record.due, "backoff")
            start = record.due
        yield from _for_start(record, known, start, known.now, is_over=False)
    elif last is not None and record.finished and not _ended_by(record, last):
        yield Span(
            "rest", last.ended or last.leased, record.finished, f"until it {record.state}",
            record.error, state=str(record.state),
        )  # fmt: skip


def _ended_by(record: Record, last: Attempt) -> bool:
    return record.state == _STATES.get(record.outcome_of(last), "")


def _running(record: Record, known: Known) -> Iterator[Span]:
    text, worker = attempt_text(record, record.run, record.current_attempt), record.worker
    if record.envelope.is_message:
        yield Span("run", record.leased, known.now, "held by its consumer", worker, is_open=True)
        return
    if not known.started:
        label = f"{text}: at the worker"
        note = f"{worker}; whether it runs yet is known only on the worker's machine"
        run = Span("run", record.leased, known.now, label, note, is_open=True)
    else:
        if known.started > record.leased:
            label = "at the worker, before its slot"
            yield Span("prefetch", record.leased, known.started, label, worker)
        run = Span("run", known.started, known.now, text, worker, is_open=True)
    yield from _run(record, run)


# -- drawing -------------------------------------------------------------------------------------


class Bar(msgspec.Struct, frozen=True):
    """A span as a bar: its place and width in a drawing that is :data:`WIDTH` wide."""

    span: Span
    after: float  # seconds from the creation of the job to the start of the span
    x: float
    width: float
    is_folded: bool = False  # drawn shorter, because it would fill nearly the whole drawing


def bars_of(spans: Sequence[Span]) -> list[Bar]:
    """The bars of spans that follow each other."""
    if not spans:
        return []
    first = spans[0].start
    total = sum(span.seconds for span in spans)
    longest = max(spans, key=lambda span: span.seconds)
    rest = total - longest.seconds
    fold = longest.kind not in ("run", "stop") and 0 < rest < total * (1 - _FOLD)
    shown = [rest if fold and span is longest else span.seconds for span in spans]
    scale = (WIDTH - LEAST_BAR * len(spans)) / (sum(shown) or 1.0)
    bars, x = [], 0.0
    for span, seconds in zip(spans, shown, strict=True):
        width = LEAST_BAR + max(0.0, seconds * scale)
        bars.append(
            Bar(span, span.start - first, round(x, 2), round(width, 2), fold and span is longest)
        )
        x += width
    return bars
