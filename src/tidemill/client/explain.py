"""Explain in one sentence why a job is in its state (``tidemill explain``), and list its events."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.store import Store
from tidemill.client.compositions import cause_of, cause_text, parents_of, why_not_retried
from tidemill.core.clock import clock, local_time
from tidemill.core.config import main_module
from tidemill.core.envelope import LimitSettings, priority_of
from tidemill.core.job import GROUP, Attempt, Outcome, Owner, Record, RunOn, State
from tidemill.core.scoreboard import read_runs
from tidemill.core.verdicts import waits_for_its_task
from tidemill.core.words import counted
from tidemill.errors import TidemillError
from tidemill.limits.arithmetic import Held
from tidemill.limits.declare import terms_text

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

AHEAD_MOST = 10_000  # the most jobs that are counted before a ready job


def explain_in(broker: Store, record: Record) -> str:
    """Explain a job with the settings, workers and limits of its store.

    The text has no value that the record lacks (:meth:`Record.without_values`).
    """
    queue, state = record.envelope.queue, record.state
    if state is State.READY:
        [row] = [row for row in broker.stats() if row.name == queue] or [QueueStats(name=queue)]
        return why_ready(broker, record, row, len(serving(broker.owners(), queue))).text
    if state is State.RUNNING:
        if record.envelope.is_message or is_stuck(record):
            return _running(record)
        owners = broker.owners()
        return _run(record, owners, serving(owners, queue))
    if state is State.SCHEDULED:
        return _scheduled(record)
    if state is State.WAITING:
        parents = [r for r in parents_of(broker, record) if r.state is not State.SUCCEEDED]
        named = ", ".join(f"{r.envelope.id} ({r.state})" for r in parents)
        return f"{_waiting(record)}: {named}" if named else _waiting(record)
    how = "was cancelled" if state is State.CANCELLED else str(state)
    text = f"It {how}" + (f": {record.error}" if record.error else "")
    cause = cause_of(broker, record)
    return text if cause is None else f"{text}; {cause_text(cause)}"


class Wait(NamedTuple):
    """What a ready job waits for.

    Attributes:
        kind: ``paused``, ``limit``, ``no-worker`` or ``wait``.
        label: a few words.
        text: a sentence, with the place of the job and, under a rate, the time.
    """

    kind: str
    label: str
    text: str


def why_ready(broker: Store, record: Record, row: QueueStats, workers: int) -> Wait:
    """Why a ready job waits; ``row`` is its queue. No hidden values, as in ``explain_in``."""
    envelope, queue = record.envelope, record.envelope.queue
    text = _ready(record, row.paused, workers)
    if row.paused:
        return Wait("paused", f"queue {queue} is paused", text)
    held = None
    if Feature.LIMITS in broker.features:
        held = with_limits(broker, "explain").held(envelope.id)
    before = broker.ahead(envelope.id, AHEAD_MOST + 1)
    if held is not None and held.terms != LimitSettings():
        name = _limit_name(held, record)
        behind = _behind(before, held, envelope.limit.cost if envelope.limit else 1.0)
        if held.until:
            return Wait("limit", f"waits for {name}", _limited(held, name, behind))
        if behind and workers and not envelope.is_message:
            text = f"It is ready, under {name}, {terms_text(held.terms)}; {behind}"
            return Wait("limit", f"waits under {name}", text)
    behind = _behind(before)
    text = f"{text}; {behind}" if behind else text
    if envelope.is_message:
        return Wait("wait", "ready for the next consumer", text)
    if not workers:
        return Wait("no-worker", f"no worker serves queue {queue}", text)
    return Wait("wait", f"waits for a free slot of {counted(workers, 'worker')}", text)


def serving(owners: Iterable[Owner], queue: str) -> list[Owner]:
    """The workers among the owners that take jobs of a queue."""
    return [
        owner
        for owner in owners
        if owner.kind == "worker" and (not owner.queues or queue in owner.queues)
    ]


def no_worker(runtime: Runtime, record: Record) -> str:
    """That no worker serves the queue of an unfinished job, and how to start one; or empty."""
    broker, envelope = runtime.broker, record.envelope
    if envelope.is_message or envelope.task == GROUP or record.state is State.RUNNING:
        return ""
    try:
        if serving(broker.owners(), envelope.queue):
            return ""
    except TidemillError:
        return ""
    seen = "" if Feature.PROCESSES in broker.features else ", which only this process sees"
    ways = ["here by `with mill.worker():`", *["in a test by `run_all(mill)`"] * bool(seen)]
    command = runtime.worker_command or _worker_command(runtime, envelope.task)
    if command and not seen:
        ways.insert(0, f"with `{command}`")
    where = f"queue {envelope.queue!r} of {broker.url}{seen}"
    return f"no worker serves {where}: start one {', or '.join(ways)}"


def _worker_command(runtime: Runtime, task: str) -> str:
    """The command that starts a worker of the app; empty if no command can import the app."""
    declared = runtime.tasks.get(task)
    module = getattr(declared.function, "__module__", "") if declared is not None else ""
    name = main_module() if module == "__main__" else module
    if name is None:  # a notebook, or a console
        return ""
    names = vars(sys.modules.get(module, sys)).items()
    apps = [key for key, value in names if _is_app(value, runtime)]
    return f"tidemill worker {name}:{apps[0]}" if apps else "tidemill worker MODULE:APP"


def _is_app(value: object, runtime: Runtime) -> bool:
    """True for an app with this runtime. A task has a runtime, too, but no schedules."""
    found = inspect.getattr_static(value, "runtime", None)
    return found is runtime and inspect.getattr_static(value, "schedules", None) is not None


def why_not_run(runtime: Runtime, record: Record) -> str:
    """Why a retry was refused, and how to run the job again nevertheless."""
    if why := why_not_retried(runtime, record):
        return why
    envelope, state = record.envelope, record.state
    key = envelope.key
    if state is State.SUCCEEDED and envelope.links is not None:
        return "it succeeded already, and jobs after it in its chain, group or flow went on"
    if state is State.SUCCEEDED:
        held = f", and holds its key {key!r} for a time" if key and envelope.unique else ""
        return f"it succeeded already{held}; retry with --force (force=True) runs it again"
    if key and state.finished:
        return (
            f"it {state}, and another job has its key {key!r}: an unfinished job, or a job that "
            "succeeded and holds it for a time; in the second case retry with --force (force=True)"
        )
    return f"it is {state}"


def why_not_altered(record: Record, queue: str | None) -> str:
    """Why a change of priority or queue was refused; ``queue`` is the queue to move to."""
    if record.state is State.RUNNING:
        return "it runs; only a job that waits gets another priority or queue"
    if record.state.finished:
        return f"it {'was cancelled' if record.state is State.CANCELLED else record.state} already"
    if queue is not None and queue != record.envelope.queue:
        return f"the queue {queue!r} is full (max_size)"
    return "it ran a moment ago; try again"


# -- by state ------------------------------------------------------------------------------------


def _ready(record: Record, paused: bool, workers: int) -> str:
    queue = record.envelope.queue
    if paused:
        return f"It is ready, but queue {queue!r} is paused: tidemill resume {queue}"
    if record.envelope.is_message:
        return f"It is ready for the next consumer of queue {queue!r}{_after(record)}"
    if not workers:
        return f"It is ready, but no worker serves queue {queue!r}: start one"
    slots = f"a free slot of {counted(workers, 'worker')}"
    return f"It is ready and waits for {slots} of queue {queue!r}"


def _scheduled(record: Record) -> str:
    why = _after(record) or ", as it was put with a delay"
    if record.error:
        why = f": {record.error}"
    if waits_for_its_task(record):
        why += f"; start a worker whose app has {record.envelope.task!r}"
    return f"It waits until {_moment(record.due)}{why}"


def _after(record: Record) -> str:
    """The last failed attempt or delivery of the current run, as text; empty without a failure."""
    if not record.attempts or not record.attempt:
        return ""
    attempt = attempt_text(record, record.run, record.attempt)
    return f": {attempt} failed ({record.attempts[-1].error})"


def _waiting(record: Record) -> str:
    links, pending = record.envelope.links, record.pending
    if links is None:
        return f"It waits for the running job with the same key {record.envelope.key!r}"
    if links.waits == RunOn.BARRIER:
        failed = f"; {record.failures} did not succeed" if record.failures else ""
        left = f"{counted(pending, 'job')} {'has' if pending == 1 else 'have'}"
        return f"It stands for a group: {left} not ended{failed}"
    how = "succeed" if links.waits == RunOn.SUCCESS else "end"
    only = ", and is forgotten if all succeed" if links.waits == RunOn.FAILURE else ""
    if pending == 1:
        return f"It waits until 1 earlier job {how}s{only}"
    return f"It waits until {pending} earlier jobs {how}{only}"


def _running(record: Record) -> str:
    if is_stuck(record):
        return "Its latest run is stuck; the job is tried again when that run has been killed"
    if record.envelope.is_message:
        ends = f", until {_moment(record.lease_ends)}, unless the consumer asks for more time"
        until = ends if record.lease_ends else ""
        return f"It is held by consumer {record.worker} since {_clock(record.leased)}{until}"
    return f"It was leased by {record.worker} at {_clock(record.leased)}, {_current(record)}"


def _current(record: Record) -> str:
    """The current attempt, its progress, and whether somebody asked to cancel the job."""
    text = attempt_text(record, record.run, record.current_attempt)
    if record.progress:
        done, total = record.progress
        text += f", {done:,} of {total:,} done" if total else f", {done:,} done"
        text += f" ({record.progress_text})" if record.progress_text else ""
    return f"{text}, and was asked to cancel" if record.cancelling else text


def _moment(moment: float) -> str:
    """A time and its distance from now: ``18:37:38, in 42 s``."""
    return f"{_clock(moment)}, in {_span(max(0.0, moment - clock.wall()))}"


def _span(seconds: float) -> str:
    """A length of time in one unit: ``22 min``."""
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _clock(moment: float) -> str:
    """A wall time in the zone of the reader, with its date unless it is today."""
    local, today = local_time(moment), local_time(clock.wall())
    return f"{local:{'%H:%M:%S' if local.date() == today.date() else '%Y-%m-%d %H:%M:%S'}}"


# -- from the store ------------------------------------------------------------------------------


def _run(record: Record, owners: list[Owner], workers: list[Owner]) -> str:
    """The run of a task: its process and its start, or the death of its worker."""
    holders = [owner for owner in owners if owner.name == record.worker]
    if not holders:
        then = "another worker takes the job over" if workers else "start a worker"
        return f"It was leased by {record.worker}, which is gone: {then}"
    boards = [(owner, read_runs(owner.board, owner.id)) for owner in holders if owner.board]
    for owner, runs in boards:
        if runs is not None and record.token in runs:
            pid, started = runs[record.token]
            where = f"process {pid} on host {owner.host}"
            return f"It has run since {_clock(started)} in {where}, {_current(record)}"
    text = _running(record)
    known = record.token and len(boards) == len(holders) and None not in [r for _, r in boards]
    return f"{text}, and waits there for a slot" if known else text


def _limit_name(held: Held, record: Record) -> str:
    """The limit of a ready job, with the key as far as the reader may see the key."""
    what = "breaker" if held.broken and held.until else "limit"
    if held.queue:
        return f"the {what} of queue {held.name!r}"
    limit = record.envelope.limit
    key = f" for key {limit.key!r}" if limit is not None and limit.key else ""
    return f"the {what} of {held.name!r}{key}"


def _behind(before: int, held: Held | None = None, cost: float = 1.0) -> str:
    """The jobs before a ready job, as if each cost as much, and its earliest start."""
    if not before:
        return ""
    count = min(before, AHEAD_MOST)
    more = "more than " if before > AHEAD_MOST else ""
    text = f"{more}{counted(count, 'job')} {'is' if before == 1 else 'are'} before it"
    if held is None:
        return text
    seconds = count * _apart(held.terms, 1.0 if held.queue else cost)
    seconds += held.until if held.until < float("inf") else 0.0
    return f"{text}, so it starts in {_span(seconds)} or later" if seconds >= 1 else text


def _apart(settings: LimitSettings, cost: float) -> float:
    """The seconds between the starts of two jobs of a cost, in the long run."""
    by_rate = settings.every * cost / 1e6
    most, seconds = settings.window or (0.0, 0.0)
    return max(by_rate, seconds * cost / most if most else 0.0)


def _limited(held: Held, name: str, behind: str) -> str:
    """The closed limit that a ready job waits for, and when it starts, as far as that is known."""
    settings, most = held.terms, held.terms.concurrency
    when = f"the next job may start in {held.until:.3g} s" if held.until < float("inf") else ""
    if held.broken:
        assert settings.breaker is not None
        failed = f"{counted(settings.breaker[0], 'attempt')} failed in a row"
        parts = [f"{name}: {failed}", when or "one job is being tried now", behind]
    elif most is not None and held.running >= most:
        parts = [f"{name}: {held.running} of {most} are running", behind]
    elif settings.rate is not None and not settings.rate[0]:
        parts = [f"{name}, whose rate of 0 lets nothing start"]
    else:
        parts = [f"{name}, {terms_text(settings)}", behind or when]
    return f"It waits for {'; '.join(filter(None, parts))}"


# -- the trail of a job ----------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """One event in the life of a job.

    Attributes:
        time: epoch seconds.
        what: the kind of event, such as ``created``, ``leased``, ``started`` or ``failed``.
        detail: a text such as the worker, or the error.
        traceback: the traceback of a failed attempt; empty for most events.
    """

    time: float
    what: str
    detail: str = ""
    traceback: str = ""


_OUTCOMES = {
    Outcome.SUCCESS: "succeeded",
    Outcome.RETRY: "failed, to be retried",
    Outcome.FAIL: "failed",
    Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired",
    Outcome.RELEASE: "interrupted",
}

_INTERRUPTED = re.compile(
    r"(interrupted|lost) after (\d+\.\d{3}) s(?:: (.*)| with its worker (.*))", re.DOTALL
)
"""The line that a worker logs for an interrupted run, or a store for a lost lease."""


def with_interrupted_runs(record: Record) -> Record:
    """The record with each interrupted run as an attempt 0, instead of a line of the log."""
    log, runs = [], [*record.attempts]
    for when, line in record.log:
        match = _INTERRUPTED.fullmatch(line)
        began = when - float(match[2]) if match else 0.0
        if match is None or began < record.envelope.created - 1:  # the task's own line
            log.append((when, line))
            continue
        what, _, why, worker = match.groups()
        later = [each.run for each in record.attempts if each.ended > when]
        leased, started = (began, 0.0) if what == "lost" else (0.0, began)
        error = why or "lost with its worker; nobody knows whether the task began"
        run = min([record.run, *later])
        runs.append(
            Attempt(0, worker or "", leased, started, when, Outcome.RELEASE, error, run=run)
        )
    if len(runs) == len(record.attempts):
        return record
    runs.sort(key=lambda run: run.ended or run.leased)
    return msgspec.structs.replace(record, log=log, attempts=runs)


def attempt_text(record: Record, run: int, number: int) -> str:
    """An attempt in words: ``run 2, attempt 1 of 4``. An interrupted run has number 0."""
    if not number:
        return f"{f'run {run}, ' if run > 1 else ''}counts no attempt"
    most = f" of {record.max_attempts}" if record.max_attempts else ""
    return f"{f'run {run}, ' if run > 1 else ''}attempt {number}{most}"


def trail_of(record: Record) -> list[Event]:
    """The events of a job, oldest first; the last event says where the job is now."""
    record = with_interrupted_runs(record)
    envelope = record.envelope
    kind = f"task {envelope.task}" if envelope.task else "message"
    detail = f"{kind} in queue {envelope.queue}, priority {priority_of(record.rank):g}"
    events = [Event(envelope.created, "created", detail)]
    for attempt in record.attempts:
        events += _attempt_events(record, attempt)
    events += [Event(when, "log", line) for when, line in record.log]
    events.sort(key=lambda event: event.time)  # stable: equal times keep their order
    return events + _current_events(record)


def _attempt_events(record: Record, attempt: Attempt) -> list[Event]:
    events = []
    if attempt.leased:
        events.append(Event(attempt.leased, "leased", f"by {attempt.worker}"))
    if attempt.started:
        text = attempt_text(record, attempt.run, attempt.number)
        events.append(Event(attempt.started, "started", text))
    took = f"after {attempt.ended - attempt.started:.3f} s" if attempt.started else ""
    detail = ": ".join(part for part in (took, attempt.error) if part)
    ended = attempt.ended or attempt.leased
    events.append(Event(ended, _ended(record, attempt), detail, attempt.traceback))
    return events


def _current_events(record: Record) -> list[Event]:
    """The event that describes the job's present state, if the attempts do not describe it."""
    if is_stuck(record):
        return [Event(record.attempts[-1].ended, "stuck", "until its old run is dead")]
    if record.state is State.RUNNING:
        return [Event(record.leased, "leased", f"by {record.worker}")]
    if record.state is State.SCHEDULED:
        return [Event(record.due, "due", "ready again then" if record.attempt else "ready then")]
    if record.state is State.WAITING and record.pending:
        jobs = counted(record.pending, "job")
        return [Event(record.envelope.created, "waiting", f"for {jobs} before it")]
    is_told = bool(record.attempts) and record.error == record.attempts[-1].error
    if record.finished and record.state is not State.SUCCEEDED and not is_told:
        return [Event(record.finished, str(record.state), record.error)]
    return []


def _ended(record: Record, attempt: Attempt) -> str:
    """How an attempt ended. The last attempt of a run fails, even if its verdict was a retry."""
    outcome = record.outcome_of(attempt)
    if attempt.outcome == Outcome.RETRY and outcome is Outcome.FAIL:
        return "failed, no attempts are left"
    return _OUTCOMES[outcome]


def is_stuck(record: Record) -> bool:
    """True when the running attempt is already counted, and its process is not killed yet."""
    running = record.state is State.RUNNING and bool(record.attempts)
    return running and record.attempts[-1].leased == record.leased
