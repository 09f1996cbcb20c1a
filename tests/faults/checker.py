"""The checks after any number of kills, from the store and from the ledger of runs.

Given the ids that were accepted, the times at which something was killed, and a drained store:

    kept       every accepted job is there, in exactly one state, and finished
    runs       every job that succeeded ran; two runs of one never overlap
    doubles    a run that ended well and was repeated had ended close before a kill, or while a
               killed server was away, so that its verdict may not have been settled: nothing else
               runs twice
    attempts   a job used at most as many attempts as it had runs; what was never interrupted used
               exactly as many
    counters   the counters of every queue equal a recount
    schedules  each time was fired once, none was left out
    limits     of one key no more ran at a time than its limit allows, and none is left counted

Module :mod:`.excuses` says what the misfortunes of a server permit. All else must hold as ever.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from excuses import Excuses
from harness import Line, Place, check_counters, runs_of

from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Record, State

SETTLING = 4.0
"""Seconds within which a verdict is settled, on a machine as busy as these tests make it."""

DYING = 1.0
"""Seconds in which what dies with the killed may still come to its end."""


def check(
    place: Place,
    accepted: Iterable[str],
    kills: Sequence[float],
    settling: float = SETTLING,
    excuses: Excuses | None = None,
) -> dict[str, int]:
    """Check everything; a table of what was seen.

    Raises:
        AssertionError: a law is broken.
    """
    accepted, excuses = list(accepted), excuses or Excuses()
    records = {record.envelope.id: record for record in place.records()}
    runs = runs_of(place.ledger())
    missing = [job_id for job_id in accepted if job_id not in records]
    lost = [job_id for job_id in missing if not excuses.missing(job_id)]
    assert not lost, f"{len(lost)} accepted jobs are lost: {lost[:5]}"
    open_ones = [r.envelope.id for r in records.values() if not r.state.finished]
    assert not open_ones, f"{len(open_ones)} jobs are not finished: {open_ones[:5]}"
    doubles, kills = 0, sorted(kills)
    for job_id in accepted:
        if job_id in records:
            mine = runs.get(job_id, [])
            doubles += _check_runs(records[job_id], mine, kills, settling, excuses)
    check_counters(place)
    _check_limits(place, records, runs, excuses)
    _check_schedules(records)
    states = [record.state for record in records.values()]
    return {
        "accepted": len(accepted),
        "missing": len(missing),
        "succeeded": states.count(State.SUCCEEDED),
        "failed": states.count(State.FAILED),
        "repeated after an end": doubles,
        "runs": sum(map(len, runs.values())),
    }


def check_nothing_held(place: Place) -> None:
    """Where nobody works: no job is running, no limit has a place taken, counters are true."""
    held = [record.envelope.id for record in place.records() if record.state is State.RUNNING]
    assert not held, f"{len(held)} jobs are running, and nobody works on them: {held[:5]}"
    _check_places(place)
    check_counters(place)


def _check_places(place: Place) -> None:
    if Feature.LIMITS in place.mill.broker.features:
        taken = [row for row in place.mill.limits.list() if row.running]
        assert taken == [], f"limits have places taken, and nobody works: {taken[:5]}"


def _check_schedules(records: Mapping[str, Record]) -> None:
    """Of schedules that catch up: their times are as far apart as the first two."""
    times: dict[str, list[float]] = defaultdict(list)
    for record in records.values():
        if planned := record.envelope.planned:
            times[planned.schedule].append(planned.time)
    for name, planned in times.items():
        planned.sort()
        steps = {round(after - before, 3) for before, after in itertools.pairwise(planned)}
        assert len(steps) <= 1, f"{name} fired {len(planned)} times, with steps of {steps}"


def _check_limits(
    place: Place,
    records: Mapping[str, Record],
    runs: Mapping[str, list[tuple[Line, Line | None]]],
    excuses: Excuses,
) -> None:
    """Of runs whose end is known: one that was killed may have gone on for a moment unseen.

    Nor of runs that the server may have forgotten: their places were free again.
    """
    if Feature.LIMITS not in place.mill.broker.features:
        return
    _check_places(place)
    moments: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    most: dict[tuple[str, str], int] = {}
    for job_id, mine in runs.items():
        limit = records[job_id].envelope.limit if job_id in records else None
        if limit is None or limit.terms.concurrency is None:
            continue
        place_of = limit.name, limit.key
        most[place_of] = limit.terms.concurrency
        for begin, end in mine:
            if end is not None and not excuses.forgotten(begin.time, end.time):
                moments[place_of] += [(begin.time, +1), (end.time, -1)]
    for place_of, changes in moments.items():
        at_a_time = list(itertools.accumulate(by for _, by in sorted(changes)))
        assert max(at_a_time) <= most[place_of], f"{max(at_a_time)} at a time of {place_of}"


def _check_runs(
    record: Record,
    runs: list[tuple[Line, Line | None]],
    kills: Sequence[float],
    settling: float,
    excuses: Excuses,
) -> int:
    job_id = record.envelope.id
    assert runs or record.state is not State.SUCCEEDED, f"{job_id} succeeded without a run"
    deaths = {a.number for a in record.attempts if "died with" in a.error or "killed by" in a.error}
    settled = {a.number for a in record.attempts} - deaths
    doubles = 0
    for (begin, end), (following, _) in itertools.pairwise(runs):
        if end is None:
            assert begin.time <= following.time
            continue
        if not excuses.forgotten(begin.time, begin.time):
            assert end.time <= following.time, f"two runs of {job_id} overlap: {runs}"
        if begin.attempt in settled and following.attempt > begin.attempt:
            continue  # it failed and was retried
        doubles += 1
        excuses.again(end.time)
        until = min(following.time, excuses.settled(end.time, settling))
        since = end.time - DYING
        assert (
            any(since <= kill <= until for kill in kills)
            or excuses.was_away(since, until)
            or excuses.forgotten(begin.time, end.time)
        ), (
            f"{job_id} had ended at {end.time} and ran again at {following.time} "
            f"without a kill in between: {record.attempts}"
        )
    # On the board a run begins a moment before its task can note it: a death or a timeout may fall
    # in between.
    unseen = deaths | {a.number for a in record.attempts if a.error.startswith("JobTimeout")}
    assert record.attempt - len(unseen) <= len(runs), f"{job_id}: {record.attempts} of {runs}"
    if all(end is not None for _, end in runs) and not doubles and not unseen:
        assert record.attempt == len(runs) or record.state is not State.SUCCEEDED, (
            f"{job_id} was never interrupted, ran {len(runs)} times, used {record.attempt}"
        )
    return doubles
