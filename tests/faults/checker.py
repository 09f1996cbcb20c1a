"""What must hold after any number of kills, told from the store and from the ledger of runs.

Given the ids that were accepted, the times at which something was killed, and a drained store:

    kept       every accepted job is there, in exactly one state, and finished
    runs       every job that succeeded ran; two runs of one never overlap
    doubles    a run that ended well and was repeated had ended close before a kill, so that its
               verdict may not have been settled: nothing else runs twice
    attempts   a job used at most as many attempts as it had runs; what was never interrupted used
               exactly as many
    counters   the counters of every queue equal a recount
    unknown    no job is left set aside, nor the name of its task
    schedules  each time was fired once, none was left out
    limits     of one key no more ran at a time than its limit allows, and none is left counted
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from harness import Line, Place, check_counters, runs_of

from tidemill.brokers.base import Feature
from tidemill.brokers.unknown import setting_aside
from tidemill.job import Record, State

SETTLING = 4.0
"""Seconds within which a verdict is settled, on a machine as busy as these tests make it."""


def check(
    place: Place, accepted: Iterable[str], kills: Sequence[float], settling: float = SETTLING
) -> dict[str, int]:
    """Check everything; a table of what was seen.

    Raises:
        AssertionError: a law is broken.
    """
    accepted = list(accepted)
    records = {record.envelope.id: record for record in place.records()}
    lost = [job_id for job_id in accepted if job_id not in records]
    assert not lost, f"{len(lost)} accepted jobs are lost: {lost[:5]}"
    open_ones = [r.envelope.id for r in records.values() if not r.state.finished]
    assert not open_ones, f"{len(open_ones)} jobs are not finished: {open_ones[:5]}"
    runs = runs_of(place.ledger())
    doubles = 0
    for job_id in accepted:
        doubles += _check_runs(records[job_id], runs.get(job_id, []), sorted(kills), settling)
    check_counters(place)
    if Feature.UNKNOWN in place.mill.broker.features:
        assert setting_aside(place.mill.broker, "the check").unknown_tasks() == []
    _check_limits(place, records, runs)
    _check_schedules(records)
    states = [record.state for record in records.values()]
    return {
        "accepted": len(accepted),
        "succeeded": states.count(State.SUCCEEDED),
        "failed": states.count(State.FAILED),
        "repeated after an end": doubles,
        "runs": sum(map(len, runs.values())),
    }


def _check_schedules(records: Mapping[str, Record]) -> None:
    """Of schedules that catch up: their times are as far apart as the first two."""
    times: dict[str, list[float]] = defaultdict(list)
    for record in records.values():
        if planned := record.envelope.planned:
            times[planned.schedule].append(planned.time)
    for name, planned in times.items():
        planned.sort()
        steps = {round(after - before, 3) for before, after in itertools.pairwise(planned)}
        assert len(steps) == 1, f"{name} fired {len(planned)} times, with steps of {steps}"


def _check_limits(
    place: Place,
    records: Mapping[str, Record],
    runs: Mapping[str, list[tuple[Line, Line | None]]],
) -> None:
    """Of runs whose end is known: one that was killed may have gone on for a moment unseen."""
    if Feature.LIMITS not in place.mill.broker.features:
        return
    assert [row.running for row in place.mill.limits.list() if row.running] == []
    moments: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    most: dict[tuple[str, str], int] = {}
    for job_id, mine in runs.items():
        limit = records[job_id].envelope.limit if job_id in records else None
        if limit is None or limit.terms.concurrency is None:
            continue
        place_of = limit.name, limit.key
        most[place_of] = limit.terms.concurrency
        for begin, end in mine:
            if end is not None:
                moments[place_of] += [(begin.time, +1), (end.time, -1)]
    for place_of, changes in moments.items():
        at_a_time = list(itertools.accumulate(by for _, by in sorted(changes)))
        assert max(at_a_time) <= most[place_of], f"{max(at_a_time)} at a time of {place_of}"


def _check_runs(
    record: Record,
    runs: list[tuple[Line, Line | None]],
    kills: Sequence[float],
    settling: float,
) -> int:
    job_id = record.envelope.id
    assert runs or record.state is not State.SUCCEEDED, f"{job_id} succeeded without a run"
    deaths = {a.number for a in record.attempts if "died with" in a.error or "killed by" in a.error}
    settled = {a.number for a in record.attempts} - deaths
    doubles = 0
    for (begin, end), (following, _) in itertools.pairwise(runs):
        if end is not None:
            assert end.time <= following.time, f"two runs of {job_id} overlap: {runs}"
            if begin.attempt in settled and following.attempt > begin.attempt:
                continue  # it failed and was retried
            doubles += 1
            assert _killed_near(kills, end.time, following.time, settling), (
                f"{job_id} had ended at {end.time} and ran again at {following.time} "
                f"without a kill in between: {record.attempts}"
            )
        else:
            assert begin.time <= following.time
    # On the board a run begins a moment before its task can note it: a death may fall in between.
    assert record.attempt - len(deaths) <= len(runs), f"{job_id}: {record.attempts} of {runs}"
    if all(end is not None for _, end in runs) and not doubles and not deaths:
        assert record.attempt == len(runs) or record.state is not State.SUCCEEDED, (
            f"{job_id} was never interrupted, ran {len(runs)} times, used {record.attempt}"
        )
    return doubles


def _killed_near(kills: Sequence[float], ended: float, again: float, settling: float) -> bool:
    """True when something was killed while the verdict of a run may not have been settled.

    What dies with the killed does so a moment later: a run of it may still come to its end.
    """
    return any(ended - 1.0 <= kill <= min(again, ended + settling) for kill in kills)
