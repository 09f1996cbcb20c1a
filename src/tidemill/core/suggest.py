"""The hint in an error about a wrong name: the nearest name, or the names that exist.

For an option or a method of another task queue, the hint says what to write in tidemill.
"""

from __future__ import annotations

from collections.abc import Iterable

_LISTED = 20
_LONGEST = 200  # characters of a wrong name that are compared

# The options of other task queues, by the tidemill option for the same thing. They do not work. The
# pages ``docs/how-to/from-*.md`` translate all other names.
_OURS = {
    "delay=": "countdown defer_by enqueue_in",
    "at=": "eta run_at run_after scheduled_at defer_until run_date",
    "retries=": "max_retries max_attempts retry max_tries",
    "retries=Retries(3, delay=5, cap=3600)": "retry_backoff retry_delay default_retry_delay "
    "min_backoff max_backoff retry_backoff_max retry_jitter retry_kwargs",
    "retries=Retries(3, on=…, never=…, when=…)": "autoretry_for retry_on dont_autoretry_for "
    "discard_on retry_when",
    "expects=": "throws",
    "timeout=": "time_limit soft_time_limit task_time_limit job_timeout default_timeout "
    "max_runtime",
    "id=": "task_id job_id message_id",
    "queue=": "queue_name routing_key channel exchange cluster",
    "expires=": "max_age ttl misfire_grace_time",
    "result_ttl=": "result_expires result_ttl_ms keep_result cached store_results",
    "nothing, or result_ttl=0, which deletes a succeeded job at once": "ignore_result",
    "nothing: a killed worker loses no job": "acks_late reject_on_worker_lost",
    "key=": "queueing_lock unique lock dedup_key max_instances",
    "key=Key(…, hold=60)": "unique_ttl dedup_ttl unique_period throttle unique_for hold",
    "key=Key(…, on_conflict=…)": "on_conflict max_wait",
    "key=Key(…, on_conflict='replace'), delay=": "debounce deduplication",
    "name=": "actor_name task_name",
    'limit="10/s", or limit=Limit(concurrency=5)': "rate_limit rate_limits concurrency_limit "
    "max_concurrency limits",
    'limit=Limit("10/s", key=lambda x: x)': "rate_key limit_key fair_key",
    'schedule="0 3 * * *", or schedule=60': "cron periodic cron_string",
    "zone=": "tz timezone time_zone",
    "every=timedelta(…)": "minutes hours days weeks seconds",
    "start=": "next_run start_date",
    "end=": "end_date",
    "tags=": "shadow description group",
    "headers=": "meta",
    "priority=10": "at_front",
    "call.on_success(other.call())": "link on_success",
    "call.on_failure(other.call())": "link_error on_failure on_stopped on_retry_exhausted",
    "chain(first.call(), task)": "depends_on",
    "this_job() inside the task": "bind context pass_context",
    "Tidemill('redis://…'), for jobs and results": "broker broker_url backend result_backend",
}

_METHODS = {
    "task.enqueue(…)": "delay delay_on_commit send kiq defer",
    "task.using(delay=5).enqueue(…)": "apply_async apply_async_on_commit send_with_options "
    "schedule",
    "task.call(…)": "s signature subtask message",
    "task.call(…), or in a chain a flow: flow.add(task.call(…), after=[node])": "si",
    "map_many(task, items)": "map starmap",
}

_BY_NAME = {name: ours for ours, names in _OURS.items() for name in names.split()}
_METHOD_BY_NAME = {name: ours for ours, names in _METHODS.items() for name in names.split()}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'queue'?``; empty when no known name is near."""
    import difflib

    near = difflib.get_close_matches(name[:_LONGEST], [str(each) for each in known], 1)
    return f"did you mean {near[0]!r}?" if near else ""


def hint(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or else the first 20 known names."""
    names = sorted(known)
    more = ", …" if len(names) > _LISTED else ""
    return did_you_mean(name, names) or f"known are {', '.join(names[:_LISTED]) or 'none'}{more}"


def our_option(name: str) -> str:
    """The tidemill option for an option of another queue; empty if unknown."""
    return _BY_NAME.get(name, "")


def our_method(name: str) -> str:
    """``; write task.enqueue(…)`` for a method of a task of another queue; empty if unknown."""
    return f"; write {_METHOD_BY_NAME[name]}" if name in _METHOD_BY_NAME else ""
