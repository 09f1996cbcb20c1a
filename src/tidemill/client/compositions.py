"""The jobs of a chain or a group: their results, and acts on all of them.

The ids of the jobs begin with the id of the chain or group. Users choose ids, so another job may
have such an id, too. So only jobs with links, and with the id endings that
:mod:`tidemill.workflows.planner` gives, count as parts. Each call of the store reads or changes one
page of jobs. If the caller dies between two pages, the same call again completes the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.brokers.contract.dependencies import was_dropped
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.inline_jobs import JobStore
from tidemill.core.codec import unpack, verify, verify_result
from tidemill.core.job import FINISHED, GROUP, WAITING_STATES, Input, Record, RunOn, State
from tidemill.core.retry import Fail
from tidemill.errors import InvalidOption, JobPruned, RetryRefused

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


PAGE = 1000  # the number of members that one read returns

MEMBER_COUNT = "members"
"""The header of a group's job that holds the number of members.

A group of a long iterator lacks this header. Then the job ``<group>.members``, which is put after
the last member, has the header.
"""


# -- results ---------------------------------------------------------------------------------------


def member_id(group_id: str, index: int) -> str:
    """The id of a group's member. The id follows from the index, so the store lists no members."""
    return f"{group_id}.{index:07d}"


def member_ids(group_id: str, count: int) -> Iterator[list[str]]:
    """The ids of all members, in pages."""
    for start in range(0, count, PAGE):
        stop = min(start + PAGE, count)
        yield [member_id(group_id, index) for index in range(start, stop)]


def size_of(broker: JobStore, record: Record, keys: Sequence[bytes] = ()) -> int | None:
    """The number of members of a group; None while the members are still being put."""
    job_id, counted = record.envelope.id, record
    if MEMBER_COUNT not in record.envelope.headers:
        job_id = f"{job_id}.{MEMBER_COUNT}"
        (found,) = broker.wait_for([job_id], 0)
        if found is None:
            return None
        counted = found
    if not keys:
        return int(counted.envelope.headers[MEMBER_COUNT])
    verify(msgspec.structs.replace(counted.envelope, id=job_id), keys)
    _, named = unpack(counted.envelope.body)
    return int(named[MEMBER_COUNT])


def members_of(broker: JobStore, group_id: str, count: int) -> Iterator[tuple[str, Record | None]]:
    """The id and record of each member, in order; None for a member that is not in the store."""
    for ids in member_ids(group_id, count):
        yield from zip(ids, broker.wait_for(ids, 0), strict=True)


def some_failed(broker: JobStore, group_id: str, count: int) -> list[Record]:
    """The latest failed jobs of a group, without those behind many other failed jobs."""
    failed = frozenset({State.FAILED})
    return broker.find(Filter(id_prefix=f"{group_id}.", states=failed, look=2000), count).records


def group_results(
    broker: JobStore, group_id: str, *, lenient: bool = False, keys: Sequence[bytes] = ()
) -> list[Any]:
    """The results of a group's members in order; the result of a nested group is a list.

    With ``lenient`` the result of a member that did not succeed is None. With ``keys`` the results
    must be signed.
    """
    (record,) = broker.wait_for([group_id], 0)
    if record is not None:
        record.envelope.id = group_id  # a signature for another id is not accepted
    count = size_of(broker, record, keys) if record is not None else None
    if count is None:
        raise JobPruned(f"group {group_id} is no longer kept")
    return [
        _member_result(broker, job_id, member, lenient=lenient, keys=keys)
        for job_id, member in members_of(broker, group_id, count)
    ]


def _member_result(
    broker: JobStore, job_id: str, record: Record | None, *, lenient: bool, keys: Sequence[bytes]
) -> Any:
    if record is None:
        if lenient:
            return None
        raise JobPruned(f"job {job_id}, a member of a group, is no longer kept")
    if record.envelope.task == GROUP:
        return group_results(broker, job_id, lenient=lenient, keys=keys)
    end = Input(job_id, record.state, record.raw_result, record.error)
    return result_of(end, lenient=lenient, keys=keys)


def result_of(end: Input, *, lenient: bool, keys: Sequence[bytes]) -> Any:
    """The result of a finished job; with ``lenient`` None for a job without success."""
    if end.state == State.SUCCEEDED:
        if keys:
            verify_result(end.id, end.result, keys)
        return unpack(end.result) if end.result else None
    if lenient:
        return None
    how = f"{end.state}: {end.error}" if end.state else "no longer kept"
    raise Fail(f"the result of job {end.id}, which is an argument, is missing: that job is {how}")


# -- acts ------------------------------------------------------------------------------------------

_WITHOUT_SUCCESS = FINISHED - {State.SUCCEEDED}
_HOOKS_MOST = 3  # the most hooks of one job
_WHOLE = 20  # the most jobs that are read at once with their results, which may be large
_PARTS = re.compile(rf"(\.(\d{{4}}|\d{{7}}|on_[a-z]+\d*|{MEMBER_COUNT}))+")


def records_of(store: JobStore, ids: Sequence[str]) -> Iterator[Record | None]:
    """The record of each job in order, read a few at a time; None for a missing job."""
    for at in range(0, len(ids), _WHOLE):
        yield from store.wait_for(ids[at : at + _WHOLE], 0)


def cancel_all(runtime: Runtime, whole_id: str, terminate: bool) -> int:
    """Cancel the jobs of a whole; return how many. Hooks stay, groups end by themselves."""
    cancelled = 0
    for records in pages_of_parts(runtime, whole_id):
        ids = [
            r.envelope.id
            for r in records
            if not r.state.finished and not is_hook(r) and r.envelope.task != GROUP
        ]
        cancelled += sum(runtime.job_store.cancel(ids, terminate=terminate))
    record = runtime.job_store.get(whole_id)
    if record is not None and record.envelope.task != GROUP:
        cancelled += sum(runtime.job_store.cancel([whole_id], terminate=terminate))
    return cancelled


def cancel_group(runtime: Runtime, group_id: str, terminate: bool) -> int:
    """Cancel the members of a group; return how many. One that lacks members ends at once."""
    cancelled = cancel_all(runtime, group_id, terminate)
    record = runtime.job_store.get(group_id)
    if record is not None and lacks_members(runtime, record):
        runtime.job_store.cancel([group_id])
    return cancelled


def _any(whole_id: str) -> bool:
    return True


def cancel_jobs(
    runtime: Runtime,
    ids: Iterable[str],
    *,
    terminate: bool = False,
    may: Callable[[str], bool] = _any,
) -> list[bool]:
    """Cancel jobs, or wholes where ``may`` is true; False for each job that has ended."""

    def cancel_whole(whole_id: str, record: Record | None) -> bool:
        if record is not None and record.envelope.task == GROUP:
            cancel_group(runtime, whole_id, terminate)
            return not record.state.finished
        return bool(cancel_all(runtime, whole_id, terminate))

    store = runtime.job_store
    return _act(
        runtime, ids, lambda part: store.cancel(part, terminate=terminate), cancel_whole, may
    )


def alter_jobs(
    runtime: Runtime,
    ids: Iterable[str],
    *,
    rank: int | None,
    queue: str | None,
    may: Callable[[str], bool] = _any,
) -> list[bool]:
    """Alter jobs; False for each that does not wait. Wholes as in :func:`cancel_jobs`."""
    return _act(
        runtime,
        ids,
        lambda part: runtime.job_store.alter(part, rank=rank, queue=queue),
        lambda whole_id, _: bool(alter_all(runtime, whole_id, rank, queue)),
        may,
    )


def delete_jobs(
    runtime: Runtime, ids: Iterable[str], *, may: Callable[[str], bool] = _any
) -> list[bool]:
    """Delete jobs; False for each that is missing. Wholes, too, or parts left of them."""

    def delete_whole(whole_id: str, _: Record | None) -> bool:
        return delete_all(runtime, whole_id)

    return _act(runtime, ids, runtime.job_store.delete, delete_whole, may, gone_too=True)


def _act(
    runtime: Runtime,
    ids: Iterable[str],
    act: Callable[[list[str]], list[bool]],
    act_on_whole: Callable[[str, Record | None], bool],
    may: Callable[[str], bool],
    *,
    gone_too: bool = False,
) -> list[bool]:
    """Act on the wholes among the jobs, and then on the others; ``gone_too``: on parts left."""
    given, done = list(ids), dict[str, bool]()
    if not _has_flows(runtime):
        return act(given)
    ids = list(dict.fromkeys(given))
    for job_id, record in zip(ids, records_of(runtime.job_store, ids), strict=True):
        if record is None:
            is_whole = gone_too and has_steps(runtime, job_id)
        else:
            is_whole = _is_composed(runtime, record)
        if is_whole and may(job_id):
            done[job_id] = act_on_whole(job_id, record)
        elif record is not None and record.envelope.task == GROUP:
            done[job_id] = False  # the record of a group alone is never changed
    alone = []
    for job_id in ids:
        whole_id = next((each for each in _ids_above(job_id) if done.get(each)), "")
        if job_id not in done and whole_id:
            done[job_id] = True
        elif job_id not in done:
            alone.append(job_id)
    done.update(zip(alone, act(alone), strict=True) if alone else ())
    return [done[job_id] for job_id in given]


def _ids_above(job_id: str) -> Iterator[str]:
    """The ids of the chains and groups that a job with this id may belong to."""
    while "." in job_id:
        job_id = job_id.rpartition(".")[0]
        yield job_id


def alter_all(runtime: Runtime, whole_id: str, rank: int | None, queue: str | None) -> int:
    """Alter the jobs of a chain or a group, hooks too, and return how many were altered."""
    runtime.features.need(Feature.ALTER, "alter()")
    altered = 0
    for records in pages_of_parts(runtime, whole_id):
        waiting = [r.envelope for r in records if r.state in WAITING_STATES]
        ids = [envelope.id for envelope in waiting if envelope.task != GROUP]
        altered += sum(runtime.job_store.alter(ids, rank=rank, queue=queue))
    return altered + sum(runtime.job_store.alter([whole_id], rank=rank, queue=queue))


def retry_all(runtime: Runtime, whole_id: str) -> int:
    """Run the jobs of a chain or a group without success again, and return their number.

    The newest job comes first, and a job is newer than the jobs that wait for it. So a job that was
    cancelled finds the jobs before it unfinished, and waits for them. If all jobs succeeded or go
    on, scheduled jobs become ready. Hooks are left out. ``RetryRefused`` names what prevents it.
    """
    if why := _hindrance(runtime, whole_id):
        raise RetryRefused(f"{whole_id} cannot run again: {why}")
    retried, refused = 0, None
    for states in (_WITHOUT_SUCCESS, frozenset({State.SCHEDULED})):
        for records in _pages(runtime, whole_id, states):
            jobs = [r for r in records if not is_hook(r) and not _is_failed_group(r)]
            done = runtime.job_store.retry([r.envelope.id for r in jobs]) if jobs else []
            retried += sum(done)
            refused = refused or next((r for r, ok in zip(jobs, done, strict=True) if not ok), None)
        if retried:
            return retried
    if refused is not None:
        raise RetryRefused(f"{whole_id} cannot run again: {_reason(runtime, refused)}")
    return 0


def retry_job(runtime: Runtime, job_id: str, *, force: bool = False) -> bool:
    """Retry a job, or the whole chain or group of this id; False when the store refuses.

    Raises:
        InvalidOption: ``force`` is given for a chain or a group.
        RetryRefused: see :func:`retry_all`; the text names the job that prevents the retry.
    """
    record = runtime.job_store.wait_for([job_id], 0)[0] if _has_flows(runtime) else None
    if record is not None and _is_whole(runtime, record):
        if force:
            raise InvalidOption(
                "a job of a chain or group that succeeded never runs again; leave force out"
            )
        return bool(retry_all(runtime, job_id))
    done = runtime.job_store.retry([job_id], force=force)[0]
    if not done and record is not None and (why := why_not_retried(runtime, record)):
        raise RetryRefused(f"{job_id} cannot run again: {why}")
    return done


def retry_jobs(
    runtime: Runtime, ids: Iterable[str], *, force: bool = False, may: Callable[[str], bool] = _any
) -> list[bool]:
    """Retry jobs, or wholes where ``may`` is true; False for each refusal. No whole is forced."""
    ids, store = list(ids), runtime.job_store
    if not _has_flows(runtime):
        return store.retry(ids, force=force)
    records = (record for record in records_of(store, ids) if record is not None)
    found = {record.envelope.id for record in records if _is_whole(runtime, record)}
    wholes = set(filter(may, found))
    alone = [job_id for job_id in ids if job_id not in wholes]
    done = dict(zip(alone, store.retry(alone, force=force), strict=True)) if alone else {}
    for whole_id in wholes:
        try:
            done[whole_id] = bool(retry_all(runtime, whole_id))
        except RetryRefused:
            done[whole_id] = False
    return [done[job_id] for job_id in ids]


def why_not_retried(runtime: Runtime, record: Record) -> str:
    """Why a job, or a chain or group, cannot run again; empty if other jobs do not prevent it."""
    if record.envelope.links is None:
        return ""
    if not _is_whole(runtime, record):
        return _reason(runtime, record)
    job_id = record.envelope.id
    bad = (r for page in _pages(runtime, job_id, _WITHOUT_SUCCESS) for r in page if not is_hook(r))
    first = next(bad, None)
    return _hindrance(runtime, job_id) or (_reason(runtime, first) if first is not None else "")


def _has_flows(runtime: Runtime) -> bool:
    return not runtime.sync and Feature.FLOWS in runtime.broker.features


def _is_composed(runtime: Runtime, record: Record) -> bool:
    """True for a group, and for the last step of a chain."""
    links, task = record.envelope.links, record.envelope.task
    if links is None or task == GROUP:
        return links is not None
    return bool(links.waits) and not is_hook(record) and has_steps(runtime, record.envelope.id)


def _is_whole(runtime: Runtime, record: Record) -> bool:
    """True for a group, and for the last step of a chain if a step before it lacks success."""
    lacks = bool(record.failures or record.pending)
    return (lacks or record.envelope.task == GROUP) and _is_composed(runtime, record)


def has_steps(runtime: Runtime, job_id: str) -> bool:
    """True for the id of a chain: the ids of other jobs, hooks left out, begin with this id."""
    parts = runtime.job_store.find(Filter(id_prefix=f"{job_id}."), _HOOKS_MOST + 1).records
    return any(_is_part(record, job_id) and not is_hook(record) for record in parts)


def _is_failed_group(record: Record) -> bool:
    """True for a group that waits again by itself when its members do."""
    return record.envelope.task == GROUP and record.state is State.FAILED


def _hindrance(runtime: Runtime, whole_id: str) -> str:
    """The job of a chain or a group that prevents a retry of all its jobs; empty for none."""
    for records in _pages(runtime, whole_id, frozenset({State.RUNNING})):
        for record in records:
            if record.cancelling and not is_hook(record):
                return f"job {record.envelope.id} was asked to stop, and still runs"
    for records in _pages(runtime, whole_id, frozenset({State.CANCELLED}), GROUP):
        for record in records:
            if lacks_members(runtime, record):
                return f"group {record.envelope.id} lacks members, which its producer never stored"
    return ""


def _reason(runtime: Runtime, record: Record) -> str:
    """The job before a job whose end prevents its retry; empty if there is none."""
    cause = cause_of(runtime.job_store, record)
    if cause is None:
        return record.error if record.failures else ""
    return f"{cause_text(cause)}; retry that job"


def lacks_members(runtime: Runtime, group: Record) -> bool:
    """True while the producer has not stored all members of a group."""
    broker, group_id = runtime.job_store, group.envelope.id
    count = size_of(broker, group)
    if count is None:
        return True
    if not count or broker.get(member_id(group_id, count - 1)) is not None:
        return False
    # The last member is missing: it was deleted, or never stored. The group also waits for members
    # that were never stored. So compare the number of jobs that the group waits for with the number
    # of unfinished members. The group is read last: a member that ends during these reads must not
    # count as a member that was never stored.
    members = members_of(broker, group_id, count)
    unfinished = sum(member is not None and not member.state.finished for _, member in members)
    record = broker.get(group_id)
    return record is not None and unfinished < record.pending


def delete_all(runtime: Runtime, whole_id: str) -> bool:
    """Delete the jobs of a chain or a group; False when there were none.

    Hooks are deleted first, because the deletion of other jobs would start them. Next comes the job
    with the id of the chain or group, because the deletion of its members would end this job.
    """
    deleted = 0
    for records in pages_of_parts(runtime, whole_id):
        deleted += sum(runtime.job_store.delete([r.envelope.id for r in records if is_hook(r)]))
    deleted += sum(runtime.job_store.delete([whole_id]))
    for records in pages_of_parts(runtime, whole_id):
        deleted += sum(runtime.job_store.delete([r.envelope.id for r in records]))
    return bool(deleted)


def _pages(
    runtime: Runtime, whole_id: str, states: frozenset[State], task: str = ""
) -> Iterator[list[Record]]:
    """The jobs of a chain or a group in these states, newest first, and the whole itself last."""
    yield from pages_of_parts(runtime, whole_id, states, task)
    record = runtime.job_store.get(whole_id)
    if record is not None and record.state in states and task in ("", record.envelope.task):
        yield [record]


def pages_of_parts(
    runtime: Runtime, whole_id: str, states: frozenset[State] = frozenset(), task: str = ""
) -> Iterator[list[Record]]:
    """The jobs of a chain, a group or a flow in pages, newest first, without the whole itself."""
    what, cursor = Filter(id_prefix=f"{whole_id}.", states=states, task=task), ""
    while True:
        page = runtime.job_store.find(what, PAGE, cursor)
        yield [record for record in page.records if _is_part(record, whole_id)]
        cursor = page.cursor
        if not cursor:
            return


def lies_in(
    runtime: Runtime, whole_id: str, queues: Collection[str], *, hooks: bool = False
) -> bool:
    """True when a whole has jobs, and all in these queues; ``hooks``: its hooks, too."""
    found = {
        record.envelope.queue
        for page in pages_of_parts(runtime, whole_id)
        for record in page
        if record.envelope.task != GROUP and (hooks or not is_hook(record))
    }
    return bool(found) and found <= {*queues}


def is_hook(record: Record) -> bool:
    """True for the job of a hook, such as ``on_success``: it runs because other jobs ended."""
    return record.envelope.links is not None and is_hook_id(record.envelope.id)


def is_hook_id(job_id: str) -> bool:
    """True for the id of a hook, among the ids of a chain or a group."""
    return job_id.rpartition(".")[2].startswith("on_")


def _is_part(record: Record, whole_id: str) -> bool:
    envelope = record.envelope
    return envelope.links is not None and bool(_PARTS.fullmatch(envelope.id, len(whole_id)))


def steps_of(runtime: Runtime, record: Record) -> dict[int, Record]:
    """The kept steps, by number, of the chain whose last step a record is; empty for other jobs."""
    begin, links = f"{record.envelope.id}.", record.envelope.links
    before = [job_id for job_id in links.inputs if job_id.startswith(begin)] if links else []
    if not before:
        return {}
    pages = pages_of_parts(runtime, record.envelope.id)
    parts = {part.envelope.id: part for page in pages for part in page}
    last = int(before[0].removeprefix(begin)) + 1
    ids = {number: f"{begin}{number:04d}" for number in range(last)}
    return {n: parts[job_id] for n, job_id in ids.items() if job_id in parts} | {last: record}


# -- causes --------------------------------------------------------------------------------------

MOST_LOOKED_AT = 5
"""The most parents of a job, or members of a group, that a search for the cause reads."""

_FLOW_JOBS = 500  # the most jobs of a flow that :func:`jobs_before` reads


def cause_of(store: JobStore, record: Record) -> Record | None:
    """The job whose end made this job end, perhaps through others; None if unknown."""
    found = None
    while was_dropped(record):
        parents = [r for r in parents_of(store, record) if r.state in _WITHOUT_SUCCESS]
        ended = _members_of(store, record) + parents
        if not ended:
            break
        found = record = ended[0]
    return found


def stopped_by(record: Record, prefixes: tuple[str, ...]) -> list[str]:
    """The ids with these prefixes among the jobs that may have stopped a dropped job."""
    links = record.envelope.links if was_dropped(record) else None
    return [job_id for job_id in links.inputs if job_id.startswith(prefixes)] if links else []


def end_of(store: JobStore, record: Record, prefixes: tuple[str, ...]) -> Record:
    """The job that stopped a chain, for the record of the last step; for others the record.

    The ids of the steps before the last have ``prefixes``. Each step names the step before it.
    """
    while ids := stopped_by(record, prefixes):
        found = map(store.get, ids[:MOST_LOOKED_AT])
        if not (ended := [r for r in found if r and r.state in _WITHOUT_SUCCESS]):
            break
        while ended:
            record, ended = ended[0], _members_of(store, ended[0])
    return record


def cause_text(cause: Record) -> str:
    """A sentence that names the cause, how it ended, and its error."""
    how = "was cancelled" if cause.state is State.CANCELLED else str(cause.state)
    return f"it began with job {cause.envelope.id}, which {how}: {cause.error}"


def parents_of(store: JobStore, record: Record) -> list[Record]:
    """Up to :data:`MOST_LOOKED_AT` jobs that a job waited for, and that the store still has."""
    links = record.envelope.links
    if links is None:
        return []
    ids = links.inputs[:MOST_LOOKED_AT]
    found = [found for found in store.wait_for(ids, 0) if found is not None] if ids else []
    return [*found, *jobs_before(store, record)][:MOST_LOOKED_AT]


def jobs_before(store: JobStore, record: Record) -> list[Record]:
    """The jobs that a job of a flow waits for by ``after=``, in the order of acceptance.

    The job names only the jobs whose results it gets; these jobs are left out. The other jobs name
    the job as their next job. The search reads a bounded number of the flow's jobs.
    """
    job_id, links = record.envelope.id, record.envelope.links
    whole = job_id.rpartition(".")[0]
    if links is None or links.waits in ("", RunOn.BARRIER):
        return []
    while whole:
        near = Filter(id_prefix=f"{whole}.", look=_FLOW_JOBS)
        records = store.find(near, limit=_FLOW_JOBS).records
        found = [r for r in records if r.envelope.links and job_id in r.envelope.links.next]
        if found:
            return [r for r in reversed(found) if r.envelope.id not in links.inputs]
        whole = whole.rpartition(".")[0]
    return []


def _members_of(store: JobStore, record: Record) -> list[Record]:
    """Members without success of a group, if the record stands for a group; failed ones first."""
    if record.envelope.task != GROUP:
        return []
    prefix, found = f"{record.envelope.id}.", list[Record]()
    for states in ({State.FAILED}, {State.CANCELLED, State.EXPIRED}):
        ended = Filter(states=frozenset(states), id_prefix=prefix)
        found = found or [
            one for one in store.find(ended, limit=MOST_LOOKED_AT).records if not is_hook(one)
        ]
    return sorted(found, key=was_dropped)
