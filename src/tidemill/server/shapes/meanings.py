"""What fields mean whose names and types do not say it, for the description of the API."""

from __future__ import annotations

__all__ = ["MEANINGS"]

_OPTIONS = {
    "id": "an id of your own; one that is taken is refused",
    "delay": "seconds before it is ready",
    "at": "when it is ready, instead of a delay: epoch seconds, to the year 6325",
    "priority": "-100 to 100, higher first",
    "ttr": "of a message: seconds to settle it in; 0: it is acknowledged when it is handed out",
    "key": "at most one unfinished job has it",
    "on_conflict": "beside key: what a put does whose key is taken; keep when it is not given",
    "unique_for": "beside key, unless on_conflict is replace or merge: seconds for which a success "
    "holds it, too",
    "max_wait": "beside on_conflict replace: seconds for which a job is put off at most",
    "expires": "seconds within which it must start, else it ends expired",
    "retries": "attempts after the first",
    "limit": "how many may start over all workers, as 10/s, 100/m or 10/30s",
    "tags": "names to find it by",
}

_RESERVE = {
    "count": "how many at most",
    "timeout": "seconds to wait until there is one",
    "order": "strict empties the first queue before the second, fair gives each its turn, "
    "merged goes by priority and age over all",
}

_LIMIT = {
    "rate": "how many may start in a time, as 10/s, 100/m or 10/30s",
    "burst": "how many may start at once; 409 when the limit has no rate and none is given",
    "window": "how many may start within any such time, as 100/m",
    "concurrency": "how many may run at a time",
}

_MATCHING = {
    "tag": "one of its tags",
    "group": "the id of a group, a chain or a flow: all its parts",
    "search": "a text in what a job shows of its arguments or its body",
    "limit": "how many at most, the newest first",
}

MEANINGS: dict[str, dict[str, str]] = {
    "MessageOptions": _OPTIONS,
    "JobIn": _OPTIONS
    | {
        "id": "an id of your own; one that is taken is refused. Beside an id in the path it is "
        "the same, or left out",
        "at": "when it is ready, instead of a delay: epoch seconds, or a time with its zone; from "
        "1970 to the year 6325",
        "key": "at most one unfinished job has it; a task may have one of its own, with which "
        "on_conflict, unique_for and max_wait go, too",
        "timeout": "of a call: seconds one run may take",
        "result_ttl": "of a call: seconds a success is kept",
        "headers": "kept with the job, and given with it",
        "queue": "where it waits: default, or as its task says",
    },
    "JobQuery": {
        "tag": "one of its tags",
        "group": "the id of a group, a chain or a flow: all its parts",
        "search": "a text in what a job shows of its arguments or its body",
        "limit": "how many at most; there may be more though it is fewer, as the cursor tells",
        "cursor": "as the list before gave it, to go on; no other text is one",
        "bodies": "with their bodies or arguments; 16 jobs at a time",
    },
    "Matching": _MATCHING,
    "CancelMatching": _MATCHING,
    "KickMatching": _MATCHING,
    "ReserveTasksIn": _RESERVE
    | {
        "tasks": "names of the tasks that the worker knows",
        "queues": "default when it is not given",
    },
    "ReservedTask": {
        "attempt": "of this run, from 1",
        "losses": "how often it was lost with its worker; such a job should run alone",
        "ttr": "seconds in which a heartbeat must come",
        "timeout": "seconds one run may take",
    },
    "HeartbeatIn": {
        "progress": "how much is done, and total of how much, if it is known",
        "log": "lines for its trail, which keeps the last 100",
    },
    "FailIn": {
        "error": "one line, as Type: message",
        "delay": "seconds until it runs again, instead of its backoff",
    },
    "ReserveIn": _RESERVE,
    "ScheduleIn": {
        "cron": "five fields, or six with seconds first; or @hourly, @daily and so on; one that "
        "never comes, as 30 February, is refused",
        "every": "seconds, or a text as 15 minutes, day or 3 months",
        "at": "a single time: epoch seconds, or with its offset, or in zone; one that is past gets "
        "409",
        "zone": "of cron, and of days and longer, as Europe/Berlin; else UTC. The server's machine "
        "has to know it. A start with another offset needs it, as do times without an offset",
        "start": "nothing comes before it, and every counts from it",
        "end": "nothing comes after it; not before start, and 409 when nothing is left. A time "
        "after the year 6325 is none",
        "repeats": "after how many it ends",
        "jitter": "seconds by which a time may be late, at random; no longer than every",
        "catch_up": "each missed time is made up for",
    },
    "LimitIn": _LIMIT,
    "QueueLimitIn": _LIMIT,
    "ScheduleOut": {
        "arguments": "of its jobs, as text",
        "when": "its rule, as text",
        "last": "the time its latest job was for",
        "fired": "how many jobs it has put",
        "code": "it is declared in code",
        "app": "which declares it, where a worker has told",
        "declared": "whether a worker lives that declares it; null when none ever did",
        "undeclared": "since when no such worker lives; null when one does",
        "known": "whether the app of this server has its task; null when it has no tasks",
    },
    "ResultOut": {"error": "the last error, as one line", "encoding": "of result"},
}
"""By schema and field."""
