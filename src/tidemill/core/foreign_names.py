"""Names of other task queues, and the tidemill names for the same things.

Nothing here works under its foreign name. It only makes the error say what to write instead.
"""

from __future__ import annotations

__all__ = ["our_attribute", "our_option", "our_result_attribute"]

_ATTRIBUTES = {
    **dict.fromkeys(("delay", "send", "kiq", "defer"), "task.enqueue(…)"),
    **dict.fromkeys(("adelay", "asend", "kick", "defer_async"), "await task.aenqueue(…)"),
    **dict.fromkeys(
        ("apply_async", "send_with_options", "configure", "kicker", "set"),
        "task.using(delay=5, queue='mail').enqueue(…)",
    ),
    **dict.fromkeys(("s", "si", "signature", "subtask", "message"), "task.call(…)"),
    **dict.fromkeys(("schedule", "enqueue_in"), "task.using(delay=5).enqueue(…)"),
    **dict.fromkeys(("enqueue_at",), "task.using(at=moment).enqueue(…)"),
    **dict.fromkeys(
        ("map", "starmap", "chunks", "bulk"), "mill.enqueue_many(task.call(x) for x in …)"
    ),
    **dict.fromkeys(("fn", "run", "call_local", "original_func"), "task(…), an ordinary call"),
    **dict.fromkeys(("retry",), "raise Retry(delay=5) inside the task"),
    **dict.fromkeys(("request",), "current_job() inside the task"),
}

_HANDLES = {
    **dict.fromkeys(
        ("get", "return_value", "get_result", "wait_result", "join", "fetch", "res"),
        "job.result(timeout=5), or await job",
    ),
    **dict.fromkeys(
        ("status", "get_status", "ready", "is_ready", "successful", "is_finished", "is_failed"),
        "job.state",
    ),
    **dict.fromkeys(("revoke", "abort"), "job.cancel(), or job.cancel(terminate=True)"),
    **dict.fromkeys(("forget", "remove"), "job.delete()"),
    **dict.fromkeys(("requeue", "restore"), "job.retry()"),
    **dict.fromkeys(("traceback", "exc_info", "get_error"), "job.attempts[-1].traceback"),
    **dict.fromkeys(("task_id", "message_id", "get_id", "uuid"), "job.id"),
    **dict.fromkeys(("info", "meta"), "job.progress, or job.record"),
    **dict.fromkeys(("then", "link"), "chain(task.call(…), other), or call.on_success(other)"),
    **dict.fromkeys(("completed_count",), "group.count()"),
    **dict.fromkeys(("date_done", "ended_at", "enqueued_at", "created_at"), "job.trail"),
}

_OPTIONS = {
    **dict.fromkeys(("countdown", "defer_by", "enqueue_in"), "delay="),
    **dict.fromkeys(("eta", "run_at", "run_after", "scheduled_at", "defer_until"), "at="),
    **dict.fromkeys(("max_retries", "max_attempts", "retry", "max_tries"), "retries="),
    **dict.fromkeys(
        ("retry_backoff", "retry_delay", "default_retry_delay", "min_backoff", "max_backoff"),
        "retries=Retries(3, delay=5, cap=3600)",
    ),
    **dict.fromkeys(
        ("time_limit", "soft_time_limit", "job_timeout", "max_runtime", "task_time_limit"),
        "timeout=",
    ),
    **dict.fromkeys(("task_id", "job_id", "message_id"), "id="),
    **dict.fromkeys(("queue_name", "routing_key", "channel"), "queue="),
    **dict.fromkeys(("max_age", "ttl"), "expires="),
    **dict.fromkeys(("result_expires", "result_ttl_ms", "keep_result"), "result_ttl="),
    **dict.fromkeys(("queueing_lock", "unique", "lock", "dedup_key"), "key="),
    **dict.fromkeys(("unique_ttl", "dedup_ttl", "unique_period", "throttle"), "unique_for="),
    **dict.fromkeys(("debounce", "deduplication"), "key=…, on_conflict='replace', delay="),
    **dict.fromkeys(("actor_name", "task_name"), "name="),
    **dict.fromkeys(
        ("rate_limit", "rate_limits", "concurrency_limit", "max_concurrency", "limits"),
        'limit="10/s", or limit=Limit(concurrency=5)',
    ),
    **dict.fromkeys(("rate_key", "limit_key", "fair_key"), 'limit=Limit("10/s", key=lambda x: x)'),
    **dict.fromkeys(("cron", "periodic", "cron_string"), 'schedule="0 3 * * *", or schedule=60'),
    **dict.fromkeys(("tz", "timezone"), "zone="),
    **dict.fromkeys(("args", "kwargs"), "task.enqueue(…), which takes the task's own arguments"),
    **dict.fromkeys(("bind", "context", "pass_context"), "current_job() inside the task"),
}


def our_attribute(name: str) -> str:
    """The tidemill name for an attribute of other queues' tasks; empty if unknown."""
    return _ATTRIBUTES.get(name, "")


def our_result_attribute(name: str) -> str:
    """The tidemill name for an attribute of other queues' results; empty if unknown."""
    return _HANDLES.get(name, "")


def our_option(name: str) -> str:
    """The tidemill name for an option of other queues; empty if unknown."""
    return _OPTIONS.get(name, "")
