"""Move all jobs, schedules and rows of history of a store into another store.

First the source is closed (``depart``): it accepts and leases no more jobs, and running jobs end.
Then the source is sealed, so that nothing in it changes, and copied page by page. The target stores
each page together with the cursor in one commit. After a kill, the next call continues at the
stored cursor, and no job moves twice. The source keeps its copy and stays closed.

See :mod:`.to_rabbitmq` for moves into a store that cannot adopt jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.store import Store
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.generic.topics import bind, bindings
from tidemill.core.crash_points import point
from tidemill.core.job import Record, State
from tidemill.errors import FeatureMissing, InvalidOption, StoreMoved
from tidemill.transfer.history import copy_history
from tidemill.transfer.to_rabbitmq import Moved, check_fits, put_all

PAGE = 500  # the most jobs that move in one commit
_LOOK = 0.2  # seconds between two checks for running jobs
_FINISHED = frozenset(state for state in State if state.finished)
PASSES: tuple[tuple[frozenset[State], Callable[[Record], bool]], ...] = (
    # Workers may run on the target meanwhile. So a job moves before the jobs that need it.
    (_FINISHED, lambda record: True),  # jobs that wait may need the results of finished jobs
    # Next come jobs that wait for other jobs: a job that ends must find the jobs after it.
    (frozenset({State.WAITING}), lambda record: record.envelope.links is not None),
    (frozenset({State.SCHEDULED, State.READY}), lambda record: True),
    # Last come jobs that wait for the job with the same key: that job has moved before.
    (frozenset({State.WAITING}), lambda record: record.envelope.links is None),
)


def move(
    source: Store,
    target: Store,
    tell: Callable[[Moved], None] = lambda _: None,
    *,
    leave: bool = False,
) -> Moved:
    """Move everything, or continue an earlier call; ``tell`` receives the progress.

    RabbitMQ as the target gets ready and scheduled jobs. Jobs that it cannot hold are refused
    before anything moves, or stay behind with ``leave``.

    Raises:
        FeatureMissing, InvalidOption: a move between this source and this target is impossible.
        StoreMoved: the source already moves to another target, or the target moves itself.
    """
    _check(source, target)
    if Feature.MOVE not in target.features:
        return _move_by_puts(source, target, tell, leave)
    if _has_schedules(source):
        need(target, Feature.SCHEDULES, "a schedule")
    if Feature.LIMITS in source.features and with_limits(source, "limits").limits():
        need(target, Feature.LIMITS, "a limit")
    source.depart(target.url)
    progress = Moved()
    _await_running(source, progress, tell)
    departure = source.depart(target.url, seal=True)
    progress.total = int(source.info()["jobs"])
    if not target.adopted(departure.mark):
        _take_settings(source, target)
    _copy(source, target, departure, progress, tell)
    if _has_schedules(source):
        _copy_schedules(source, target, departure, progress)
    copy_history(source, target, departure.mark)
    return progress


def _check(source: Store, target: Store) -> None:
    if Feature.MOVE not in source.features:
        raise FeatureMissing(
            f"the jobs of {source.url} cannot move: let its workers empty it, and put new jobs "
            f"into {target.url}"
        )
    if source.identity == target.identity:
        raise InvalidOption(f"both urls name the same store, {source.url}")
    where = target.info().get("moves_to")
    if where:
        raise StoreMoved(f"{target.url} moves to {where} itself, and runs nothing; use that url")


def _move_by_puts(
    source: Store, target: Store, tell: Callable[[Moved], None], leave: bool
) -> Moved:
    progress = Moved()
    if not leave:
        check_fits(source, target)
    source.depart(target.url)
    _await_running(source, progress, tell)
    if not leave:
        try:
            check_fits(source, target)
        except InvalidOption:  # a job that the target cannot hold came after the first check
            source.stay()
            raise
    put_all(source, target, progress, tell)
    return progress


def cancel_move(source: Store, target: Store) -> None:
    """Let the source accept and lease jobs again, if the target has none of its jobs yet.

    Raises:
        InvalidOption: the target has jobs of the source, so the move must be finished. A move into
            RabbitMQ can always be cancelled: the jobs that have moved stay there.
    """
    need(source, Feature.MOVE, "move")
    departure = source.depart(target.url)
    if Feature.MOVE in target.features and target.adopted(departure.mark):
        raise InvalidOption(
            f"jobs of {source.url} are in {target.url} already and may have run there; "
            "finish the move by giving the command again without --cancel"
        )
    source.stay()


def _await_running(source: Store, progress: Moved, tell: Callable[[Moved], None]) -> None:
    while True:
        progress.running = sum(row.running for row in source.stats())
        tell(progress)
        if not progress.running:
            return
        time.sleep(_LOOK)
        source.tick()


def _take_settings(source: Store, target: Store) -> None:
    for row in source.stats():
        if row.paused or row.max_size:
            target.set_queue(row.name, paused=row.paused or None, max_size=row.max_size or None)
    for binding in bindings(source).table:
        bind(target, binding.queue, binding.pattern)
    if Feature.LIMITS not in source.features:
        return
    for limit in with_limits(source, "limits").limits():
        there = with_limits(target, f"the limit {limit.name!r}")
        if limit.declared is not None:
            there.set_limit(limit.name, limit.declared, queue=limit.queue, declared=True)
        if limit.by_hand:
            there.set_limit(limit.name, limit.terms, queue=limit.queue)


def _has_schedules(source: Store) -> bool:
    return Feature.SCHEDULES in source.features and bool(source.list_schedules("", 1))


def _copy_schedules(source: Store, target: Store, departure: Departure, progress: Moved) -> None:
    """Copy the schedules after the jobs, so that new jobs of schedules come after moved jobs."""
    number, _, after = target.adopted(departure.mark).partition(":")
    if int(number) > len(PASSES):
        return  # an earlier call copied the schedules, and some may have ended meanwhile
    while page := source.list_schedules(after, PAGE):
        after = page[-1].name
        point("move.scheduling")
        taken = target.adopt(departure, [], f"{len(PASSES)}:{after}", page)
        point("move.scheduled")
        names = [
            (schedule.name, here)
            for schedule, here in zip(page, taken, strict=True)
            if schedule.name > LAST_OWN
        ]
        progress.schedules += sum(here for _, here in names)
        progress.stayed_schedules += [name for name, here in names if not here]
    target.adopt(departure, [], f"{len(PASSES) + 1}:")


def _copy(
    source: Store,
    target: Store,
    departure: Departure,
    progress: Moved,
    tell: Callable[[Moved], None],
) -> None:
    for number, cursor in _pages(target.adopted(departure.mark)):
        states, goes = PASSES[number]
        what = Filter(states=states)
        while True:
            page = source.find(what, PAGE, cursor)
            cursor = page.cursor
            mark = f"{number}:{cursor}" if cursor else f"{number + 1}:"
            point("move.adopting")
            ids = [record.envelope.id for record in page.records if goes(record)]
            found = source.wait_for(ids, 0) if ids else []  # a list lacks results and bodies
            records = [record for record in found if record is not None]
            if any(record.envelope.links for record in records):
                need(target, Feature.FLOWS, "a job that waits for others")
            taken = target.adopt(departure, records, mark)
            point("move.adopted")
            progress.stayed += [
                record.envelope.id for record, here in zip(records, taken, strict=True) if not here
            ]
            progress.done += len(taken)
            tell(progress)
            if not cursor:
                break


def _pages(reached: str) -> Iterator[tuple[int, str]]:
    """The number and the first cursor of each pass that is left to do after ``reached``."""
    number, _, cursor = reached.partition(":")
    first = int(number or 0)
    for pass_number in range(first, len(PASSES)):
        yield pass_number, cursor if pass_number == first else ""
