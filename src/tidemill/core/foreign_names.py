"""Names of other task queues, and the tidemill names for the same things.

The foreign names do not work. An error about a foreign name names the tidemill name to use.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["job", "chain", "group"]

_LEAVE_OUT = "leave it out: "
"""Begins the advice for a foreign name that has no counterpart."""

_APP = {
    **dict.fromkeys(("send_task",), "mill.enqueue('shop.task', …)"),
    **dict.fromkeys(("conf", "config_from_object"), "the options of Tidemill(…)"),
    **dict.fromkeys(
        ("add_periodic_task", "add_job", "crontab", "register"),
        "mill.schedule('name', task.call(…), every=60)",
    ),
    **dict.fromkeys(("periodic_task", "scheduled_job", "cron"), '@mill.task(schedule="0 3 * * *")'),
    **dict.fromkeys(("lock_task",), "@mill.task(key='name'), or mill.limits.hold('name')"),
    **dict.fromkeys(("rate_limit",), '@mill.task(limit="10/s")'),
    **dict.fromkeys(("actor", "shared_task", "context_task", "db_task"), "@mill.task"),
    **dict.fromkeys(("AsyncResult", "result", "fetch_job", "GroupResult"), "mill.job(id)"),
    **dict.fromkeys(
        ("signal", "pre_execute", "post_execute", "add_middleware"), "Tidemill(middleware=[…])"
    ),
    **dict.fromkeys(("on_startup", "on_after_configure"), "@mill.on('process_start')"),
    **dict.fromkeys(("on_shutdown",), "@mill.on('process_stop')"),
    **dict.fromkeys(
        ("control", "inspect"), "mill.job(id).cancel(), mill.jobs(…), or the command tidemill"
    ),
    **dict.fromkeys(("worker_main", "start", "run"), "the command tidemill worker shop:mill"),
    **dict.fromkeys(
        ("autodiscover_tasks", "finalize"),
        f"{_LEAVE_OUT}import the modules with tasks below the line that makes the app",
    ),
    **dict.fromkeys(("get_jobs", "pending", "scheduled"), "mill.jobs(…), or mill.schedules"),
    **dict.fromkeys(("remove_job", "pause_job", "resume_job", "get_job"), "mill.schedules"),
    **dict.fromkeys(("flush", "purge", "empty"), "mill.queue('name').purge()"),
    **dict.fromkeys(("immediate", "is_async"), "mill.sync"),
}

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
    **dict.fromkeys(
        ("fn", "run", "apply", "call_local", "original_func"), "task(…), an ordinary call"
    ),
    **dict.fromkeys(("retry",), "raise Retry(delay=5) inside the task"),
    **dict.fromkeys(("request",), "this_job() inside the task"),
    **dict.fromkeys(("enqueue_call",), "task.enqueue(…)"),
    **dict.fromkeys(
        ("delay_on_commit", "apply_async_on_commit"),
        "transaction.on_commit(lambda: task.enqueue(…))",
    ),
    **dict.fromkeys(("revoke", "restore", "is_revoked"), "tidemill limit TASK --rate 0/s"),
    **dict.fromkeys(("then",), "chain(task.call(…), other)"),
    **dict.fromkeys(("error",), "task.call(…).on_failure(other.call())"),
    **dict.fromkeys(("AsyncResult",), "mill.job(id)"),
    **dict.fromkeys(
        ("update_state", "send_event"), "this_job().progress(done, total, text) inside the task"
    ),
    **dict.fromkeys(("replace", "add_to_chord"), "other.enqueue(…) inside the task"),
    **dict.fromkeys(("logger", "get_logger"), "logging.getLogger(__name__)"),
    **dict.fromkeys(
        ("retries", "retry_delay", "max_retries", "default_retry_delay"), "task.options.retries"
    ),
    **dict.fromkeys(("queue_name", "queue"), "task.options.queue"),
    **dict.fromkeys(("priority",), "task.using(priority=…)"),
    **dict.fromkeys(("actor_name", "task_name"), "task.name"),
    **dict.fromkeys(("copy", "clone"), "task.using(…)"),
}

_HANDLES = {
    **dict.fromkeys(
        ("get", "return_value", "get_result", "wait_result", "join", "fetch", "res"),
        "job.result(timeout=5), or await job",
    ),
    **dict.fromkeys(
        (
            *("status", "get_status", "ready", "is_ready", "is_finished", "is_queued"),
            *("is_started", "is_scheduled", "is_deferred", "completed"),
        ),
        "job.state, such as job.state.finished",
    ),
    **dict.fromkeys(("successful", "success", "is_successful"), "job.state == 'succeeded'"),
    **dict.fromkeys(("failed", "is_failed"), "job.state == 'failed'"),
    **dict.fromkeys(
        ("stopped", "is_stopped", "is_canceled", "is_revoked"), "job.state == 'cancelled'"
    ),
    **dict.fromkeys(("get_results",), "job.result(timeout=5)"),
    **dict.fromkeys(("latest_result",), "job.result(timeout=5)"),
    **dict.fromkeys(
        ("collect", "children", "parent", "completed_count"),
        "mill.enqueue(chain(…)) or mill.enqueue(group(…)), whose handle knows all its jobs",
    ),
    **dict.fromkeys(("kill", "terminate"), "job.cancel(terminate=True)"),
    **dict.fromkeys(
        ("reschedule",), "task.using(key='k', on_conflict='replace', delay=5).enqueue(…)"
    ),
    **dict.fromkeys(
        ("reset",), f"{_LEAVE_OUT}a result may be read again and again, until it is pruned"
    ),
    **dict.fromkeys(("get_position",), "tidemill explain ID, which says what the job waits for"),
    **dict.fromkeys(("func_name", "actor_name", "task_name", "task"), "job.record.envelope.task"),
    **dict.fromkeys(("args", "kwargs"), "job.record.envelope.text, or the command tidemill job ID"),
    **dict.fromkeys(("revoke", "abort"), "job.cancel(), or job.cancel(terminate=True)"),
    **dict.fromkeys(("forget", "remove"), "job.delete()"),
    **dict.fromkeys(("requeue", "restore"), "job.retry()"),
    **dict.fromkeys(("traceback", "exc_info", "get_error"), "job.attempts[-1].traceback"),
    **dict.fromkeys(("task_id", "message_id", "get_id", "uuid"), "job.id"),
    **dict.fromkeys(("info", "meta", "get_meta"), "job.progress, job.progress_text, or job.record"),
    **dict.fromkeys(("save_meta",), "this_job().progress(done, total, text) inside the task"),
    **dict.fromkeys(("then", "link"), "chain(task.call(…), other), or call.on_success(other)"),
    **dict.fromkeys(("date_done", "ended_at", "enqueued_at", "created_at"), "job.trail"),
}

_CHAINS = dict.fromkeys(("collect", "children", "parent"), "job.steps")

_GROUPS = {
    **dict.fromkeys(
        (
            *("get", "return_value", "get_result", "wait_result", "join", "fetch", "res"),
            *("get_results", "latest_result"),
        ),
        "group.results(timeout=5), or await group",
    ),
    **dict.fromkeys(("collect", "children", "parent"), "a loop over the group, or group[0]"),
    **dict.fromkeys(("completed_count",), "group.count()"),
    **dict.fromkeys(
        ("error", "traceback", "exc_info", "get_error"),
        "a loop over group.failures, whose members have .error and .attempts",
    ),
    **dict.fromkeys(("func_name", "actor_name", "task_name", "task"), "group[0].record"),
    **dict.fromkeys(("args", "kwargs"), "group[0].record, or the command tidemill job ID"),
    **dict.fromkeys(("info", "meta", "get_meta"), "group.progress, or group.refresh()"),
    **dict.fromkeys(("date_done", "ended_at", "enqueued_at", "created_at"), "group.refresh()"),
}

_RESULTS = f"{_LEAVE_OUT}every result is stored; result_ttl=0 deletes the job at once"

_OPTIONS = {
    **dict.fromkeys(("countdown", "defer_by", "enqueue_in"), "delay="),
    **dict.fromkeys(("eta", "run_at", "run_after", "scheduled_at", "defer_until"), "at="),
    **dict.fromkeys(("max_retries", "max_attempts", "retry", "max_tries"), "retries="),
    **dict.fromkeys(
        ("retry_backoff", "retry_delay", "default_retry_delay", "min_backoff", "max_backoff"),
        "retries=Retries(3, delay=5, cap=3600)",
    ),
    **dict.fromkeys(("retry_jitter",), "retries=Retries(3, jitter=True)"),
    **dict.fromkeys(("retry_backoff_max",), "retries=Retries(3, cap=600)"),
    **dict.fromkeys(("retry_kwargs",), "retries=Retries(…)"),
    **dict.fromkeys(("autoretry_for", "retry_on"), "retries=Retries(3, on=…)"),
    **dict.fromkeys(("dont_autoretry_for", "discard_on"), "retries=Retries(3, never=…)"),
    **dict.fromkeys(("retry_when",), "retries=Retries(3, when=…)"),
    **dict.fromkeys(("throws",), "expects=… (Celery), or retries=Retries(3, never=…) (Dramatiq)"),
    **dict.fromkeys(
        (
            *("time_limit", "soft_time_limit", "job_timeout", "max_runtime", "task_time_limit"),
            "default_timeout",
        ),
        "timeout=",
    ),
    **dict.fromkeys(("task_id", "job_id", "message_id"), "id="),
    **dict.fromkeys(("queue_name", "routing_key", "channel", "exchange", "cluster"), "queue="),
    **dict.fromkeys(("max_age", "ttl"), "expires="),
    **dict.fromkeys(("misfire_grace_time",), "task.using(expires=60).call()"),
    **dict.fromkeys(("result_expires", "result_ttl_ms", "keep_result", "cached"), "result_ttl="),
    **dict.fromkeys(("ignore_result", "save", "store_results", "results"), _RESULTS),
    **dict.fromkeys(("failure_ttl",), "?keep_failed= in the URL"),
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
    **dict.fromkeys(("tz", "timezone", "time_zone"), "zone="),
    **dict.fromkeys(("trigger", "schedule_type"), "a cron text after the call, or every= or at="),
    **dict.fromkeys(("minutes", "hours", "days", "weeks", "seconds"), "every=timedelta(…)"),
    **dict.fromkeys(("run_date",), "at="),
    **dict.fromkeys(("next_run", "start_date"), "start="),
    **dict.fromkeys(("next_run_time",), "mill.schedules.run('name') for a run now, or start="),
    **dict.fromkeys(("end_date",), "end="),
    **dict.fromkeys(("repeat",), "repeats= of mill.schedules.add"),
    **dict.fromkeys(("coalesce",), "catch_up=True in the place of coalesce=False"),
    **dict.fromkeys(("max_instances",), "key= of the call, or limit=Limit(concurrency=3)"),
    **dict.fromkeys(
        ("replace_existing",), f"{_LEAVE_OUT}a declared schedule replaces the one before it"
    ),
    **dict.fromkeys(("intended_date_kwarg",), "this_job().planned inside the task"),
    **dict.fromkeys(
        ("broker", "broker_url", "backend", "result_backend"),
        "give the URL: Tidemill('redis://…'), for jobs and results alike",
    ),
    **dict.fromkeys(
        ("acks_late", "acks_on_failure", "reject_on_worker_lost", "acks_on_failure_or_timeout"),
        f"{_LEAVE_OUT}the store keeps a job until its run has ended",
    ),
    **dict.fromkeys(("ack_failure",), "retries=0"),
    **dict.fromkeys(("track_started",), f"{_LEAVE_OUT}job.state says running"),
    **dict.fromkeys(
        ("serializer", "compression"),
        f"{_LEAVE_OUT}plain data travel as msgpack; Tidemill(serializer='pickle') signs pickles",
    ),
    **dict.fromkeys(("base",), f"{_LEAVE_OUT}tasks are functions; use Tidemill(middleware=[…])"),
    **dict.fromkeys(("shadow", "description", "group"), "tags="),
    **dict.fromkeys(("meta",), "headers="),
    **dict.fromkeys(("link", "on_success"), "call.on_success(other.call())"),
    **dict.fromkeys(
        ("link_error", "on_failure", "on_stopped", "on_retry_exhausted"),
        "call.on_failure(other.call())",
    ),
    **dict.fromkeys(("hook", "webhooks"), "call.on_complete(other.call())"),
    **dict.fromkeys(("depends_on",), "chain(first.call(), task), or flow.add(call, after=[node])"),
    **dict.fromkeys(("pipe_ignore",), "flow.add(call, after=[node])"),
    **dict.fromkeys(
        ("notify_shutdown",), f"{_LEAVE_OUT}this_job().stopping tells every task of the stop"
    ),
    **dict.fromkeys(("at_front",), "priority=10"),
    **dict.fromkeys(("sync",), "task(…), an ordinary call, or Tidemill(sync=True)"),
    **dict.fromkeys(("args", "kwargs"), "task.enqueue(…), which takes the task's own arguments"),
    **dict.fromkeys(("bind", "context", "pass_context"), "this_job() inside the task"),
}


def our_app_attribute(name: str) -> str:
    """The advice for an attribute of other queues' apps, such as ``write …``; empty if unknown."""
    return _advice(_APP.get(name, ""))


def our_attribute(name: str) -> str:
    """The advice for an attribute of other queues' tasks; empty if unknown."""
    return _advice(_ATTRIBUTES.get(name, ""))


def our_result_attribute(name: str, kind: Kind = "job") -> str:
    """The advice for an attribute of other queues' results; empty if unknown.

    ``kind`` is the kind of the handle: the advice names only attributes that the handle has.
    """
    special = {"job": {}, "chain": _CHAINS, "group": _GROUPS}[kind].get(name)
    ours = special or _HANDLES.get(name, "")
    return _advice(ours.replace("job.", "group.") if kind == "group" else ours)


def our_option(name: str) -> str:
    """The advice for an option of other queues; empty if unknown."""
    return _advice(_OPTIONS.get(name, ""))


def _advice(ours: str) -> str:
    return ours if not ours or ours.startswith((_LEAVE_OUT, "give ")) else f"write {ours}"
