"""Descriptions of fields for the OpenAPI description, where name and type do not suffice."""

from __future__ import annotations

_OPTIONS = {
    "id": "an id of your choice; an id that exists already is refused",
    "delay": "seconds until the job is ready",
    "at": "the time at which the job is ready, instead of a delay: epoch seconds, up to the year "
    "6325",
    "priority": "-100 to 100, higher first",
    "ttr": "for a message: seconds in which it must be settled; 0: acknowledged when it is "
    "delivered",
    "key": "a unique key: at most one unfinished job has it",
    "on_conflict": "with key: what a put does when another job has the key; default: keep",
    "unique_for": "with key, unless on_conflict is replace or merge: seconds for which a succeeded "
    "job also keeps the key",
    "max_wait": "with on_conflict replace: the longest time that replacing may delay the job, in "
    "seconds",
    "expires": "seconds in which the job must start; after them it ends as expired",
    "retries": "attempts after the first attempt",
    "limit": "a rate limit over all workers, such as 10/s, 100/m or 10/30s",
    "tags": "names by which the job can be found",
}

_RESERVE = {
    "count": "the most jobs to reserve",
    "timeout": "seconds to wait for the first job",
    "order": "strict: all jobs of the first queue before the second; fair: the queues take turns; "
    "merged: by priority and age over all queues",
}

_LIMIT = {
    "rate": "the rate at which jobs may start, such as 10/s, 100/m or 10/30s",
    "burst": "jobs that may start at once; 409 if the limit has no rate and the request has none",
    "window": "jobs that may start in any period of this length, such as 100/m",
    "concurrency": "jobs that may run at the same time",
}

_MATCHING = {
    "tag": "a tag of the job",
    "group": "the id of a group, a chain or a flow, for all its jobs",
    "search": "a text in the summary of the arguments or the body",
    "limit": "the most jobs, the newest first",
}

MEANINGS: dict[str, dict[str, str]] = {
    "MessageOptions": _OPTIONS,
    "PublishQuery": {
        name: _OPTIONS[name]
        for name in ("delay", "at", "priority", "ttr", "expires", "retries", "tags")
    }
    | {"mandatory": "refuse the message with 404 when no queue is bound to the topic"},
    "JobIn": _OPTIONS
    | {
        "id": "an id of your choice; an id that exists already is refused. If the path has an id, "
        "this must be the same or missing",
        "at": "the time at which the job is ready, instead of a delay: epoch seconds, or a time "
        "with its zone; from 1970 to the year 6325",
        "key": "a unique key: at most one unfinished job has it. A task may have a key of its own, "
        "to which on_conflict, unique_for and max_wait apply, too",
        "timeout": "for a call: seconds that one run may take",
        "result_ttl": "for a call: seconds for which the result of a success is kept",
        "headers": "stored with the job, and delivered with it",
        "queue": "the queue of the job; without it, the queue of the task, or default",
    },
    "JobQuery": {
        "tag": "a tag of the job",
        "group": "the id of a group, a chain or a flow, for all its jobs",
        "search": "a text in the summary of the arguments or the body",
        "limit": "the most jobs; a shorter list may have a cursor for more",
        "cursor": "the cursor of the previous list; it continues that list",
        "bodies": "include bodies or arguments; then a list has at most 16 jobs",
    },
    "Matching": _MATCHING,
    "CancelMatching": _MATCHING,
    "KickMatching": _MATCHING,
    "ReserveTasksIn": _RESERVE
    | {
        "tasks": "the names of the tasks that the worker knows",
        "queues": "the queues; default: the queue default",
    },
    "ReservedTask": {
        "attempt": "the number of the attempt in this run, from 1",
        "losses": "how often the job was lost with its worker; such a job should run alone",
        "ttr": "seconds in which the next heartbeat must come",
        "timeout": "seconds that one run may take",
    },
    "HeartbeatIn": {
        "progress": "the work done, a whole number; total is all the work, if known",
        "text": "what the task does now; kept with progress, and replaced by its next report",
        "log": "lines for the log of the job, which keeps the last 100",
    },
    "FailIn": {
        "error": "one line, such as Type: message",
        "delay": "seconds until the job runs again, instead of its backoff",
    },
    "ReserveIn": _RESERVE,
    "ScheduleIn": {
        "cron": "five fields, or six with seconds first; or @hourly, @daily and so on. An "
        "expression that never fires, such as 30 February, is refused",
        "every": "seconds, or a text such as 15 minutes, day or 3 months",
        "at": "a single time: epoch seconds, a time with an offset, or a local time in zone. A "
        "time in the past gets 409",
        "zone": "the time zone of cron, and of days and longer periods, such as Europe/Berlin; "
        "default: UTC. The server's machine must know the zone. A start with another offset, and "
        "times without an offset, need a zone",
        "start": "the schedule does not fire before this time, and every counts from it",
        "end": "the schedule does not fire after this time; not before start. 409 when no time is "
        "left. A time after the year 6325 means no end",
        "repeats": "the number of jobs after which the schedule ends",
        "jitter": "the longest random delay of each time, in seconds; no longer than every",
        "catch_up": "put a job for each missed time",
    },
    "LimitIn": _LIMIT,
    "QueueLimitIn": _LIMIT,
    "ScheduleOut": {
        "arguments": "the arguments of its jobs, as text",
        "when": "the rule of its times, as text",
        "last": "the time of its latest job",
        "fired": "the number of jobs that it has put",
        "code": "whether code declares the schedule",
        "app": "the app that declares it, if a worker has reported it",
        "declared": "whether a live worker declares it; null when no worker ever did",
        "undeclared": "when the last live worker stopped declaring it; null while one declares it",
        "known": "whether the app of this server has the task; null when the app has no tasks",
    },
    "ResultOut": {"error": "the last error, as one line", "encoding": "the encoding of result"},
}
"""The descriptions, by schema and field."""
