"""Enqueue calls of any function, by the function or its dotted path: alone, together, in chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidemill.client.context import this_job
from tidemill.client.task import Call, Ended, import_task
from tidemill.core.clock import new_id
from tidemill.core.envelope import FUNCTION
from tidemill.django.model_arguments import of_key, to_key
from tidemill.django.project import DjangoMill, on_connections, project_mill
from tidemill.django.q.results import (
    UNGROUP,
    Task,
    fetch,
    fetch_group,
    group_tag,
    name_tag,
    result,
    result_group,
    split_group,
    ungrouped_tag,
)
from tidemill.django.settings import cluster, task_defaults, uses_django_q
from tidemill.errors import InvalidOption
from tidemill.worker.inline import run_composed, run_inline
from tidemill.workflows.compose import Flow, group

RUN, HOOK = "tidemill.django.q.run", "tidemill.django.q.hook"

OPTIONS = (  # the keywords of ``async_task`` that are not arguments of the function
    *("hook", "group", "timeout", "save", "sync", "cached", "broker", "cluster", "task_name"),
    *("ack_failure", "iter_count", "iter_cached", "chain", "priority"),
)

IDS_PER_JOB = 1000  # the most ids that one job of ``delete_group`` names
KEPT_FOR = 30 * 86400.0  # seconds for which the store remembers that a task has left its group

Func = Callable[..., Any] | str
Options = dict[str, Any]


def async_task(func: Func, *args: Any, **kwargs: Any) -> str:
    """Enqueue a call, and return the id of its task.

    The keywords are the keywords of the function, and the options of django-q: ``hook group timeout
    save sync cached cluster task_name ack_failure q_options``. ``cluster`` names a queue. The
    keyword ``priority`` is an addition of tidemill.

    Raises:
        InvalidOption: the function has no dotted path, or an option is wrong.
        CodecError: an argument is not plain data.
    """
    options, kwargs = split_options(kwargs)
    return enqueue(call_of(func, args, kwargs, options), options)


def split_options(kwargs: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of django-q, and the keywords of the function."""
    kwargs = dict(kwargs)
    options = dict(kwargs.pop("q_options", None) or {})
    options |= {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    for name in options:
        if name not in OPTIONS:
            raise InvalidOption(f"async_task has no option {name!r} in q_options")
    return options, kwargs


def path_of(func: Func) -> str:
    """The dotted path of a function. Raises InvalidOption if no worker could find the function."""
    if isinstance(func, str):
        return func
    name = getattr(func, "__qualname__", "")
    module = getattr(func, "__module__", "") or ""
    if not name or "<" in name or not module:
        raise InvalidOption(f"{func!r} has no dotted path by which a worker could find it")
    return f"{module}.{name}"


def call_of(func: Func, args: Any, kwargs: Mapping[str, Any], options: Options) -> Call[Any]:
    """The call of the job. Raises InvalidOption without the setting ``Q_CLUSTER``."""
    if not uses_django_q():
        raise InvalidOption(
            "tidemill.django.q lets jobs name any function; to allow that, add the setting "
            "Q_CLUSTER = {}"
        )
    declare(project_mill())
    named = {name: to_key(value) for name, value in kwargs.items()}
    call = _call(RUN, func, [*map(to_key, args)], named)
    using: dict[str, Any] = task_defaults()
    tags = []
    if options.get("group"):
        tags.append(group_tag(options["group"]))
    if options.get("task_name"):
        tags.append(name_tag(options["task_name"]))
    if options.get("timeout"):
        using["timeout"] = options["timeout"]
    if options.get("ack_failure"):
        using["retries"] = 0
    if options.get("save") is False:
        using["result_ttl"] = 0
    elif options.get("cached") and options["cached"] is not True:
        using["result_ttl"] = options["cached"]
    if options.get("cluster"):
        using["queue"] = options["cluster"]
    if options.get("priority"):
        using["priority"] = options["priority"]
    call = call.using(**using, tags=tags)
    if hook := options.get("hook"):
        call = call.on_complete(_call(HOOK, hook))
    return call


def _call(task: str, func: Func, *args: Any) -> Call[Any]:
    call: Call[Any] = project_mill().call(task, path_of(func), *args)
    return call.using(headers={FUNCTION: path_of(func)})


def enqueue(call: Any, options: Options) -> str:
    """Enqueue a call, and return its id. With ``sync`` run the call now, and raise its error."""
    mill = project_mill()
    if not (options.get("sync") or cluster().get("sync") or mill.sync):
        return str(mill.enqueue(call).id)
    job_id = new_id()
    if isinstance(call, Call) and not call.hooks:
        on_connections(lambda: run_inline(mill.runtime, call, job_id=job_id))
    else:
        named = call.using(id=job_id)
        on_connections(lambda: run_composed(mill.runtime, named))
    return job_id


# -- many calls ------------------------------------------------------------------------------------


def async_iter(func: Func, args_iter: Iterable[Any], **kwargs: Any) -> str:
    """Enqueue a call for each item; return the id of a task whose result lists all results."""
    options, kwargs = split_options(kwargs)
    own = {name: value for name, value in options.items() if name not in ("hook", "task_name")}
    calls = [call_of(func, _tuple(args), kwargs, own) for args in args_iter]
    if not calls:
        raise InvalidOption("async_iter needs at least one tuple of arguments")
    all_of_them: Any = group(calls)
    if hook := options.get("hook"):
        all_of_them = all_of_them.on_complete(_call(HOOK, hook))
    return enqueue(all_of_them, options)


def _tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)


def async_chain(
    chain: Iterable[Any],
    group: str | None = None,
    cached: Any = None,
    sync: bool | None = None,
    broker: Any = None,
) -> str:
    """Enqueue calls that run one after the other, and return the name of their group.

    A link is a function, ``(function, args)`` or ``(function, args, kwargs)``. No link gets the
    result of the previous link. After a failure the later links are cancelled.
    """
    name, flow, before = group or new_id(), Flow(), None
    for link in chain:
        func, args, kwargs = _link(link)
        options, kwargs = split_options(kwargs)
        call = call_of(func, _tuple(args), kwargs, {**options, "group": name, "cached": cached})
        before = flow.add(call, after=[] if before is None else [before])
    if before is None:
        raise InvalidOption("async_chain needs at least one function")
    enqueue(flow, {"sync": sync})
    return name


def _link(link: Any) -> tuple[Any, Any, dict[str, Any]]:
    if not isinstance(link, (tuple, list)):
        return link, (), {}
    parts = [*link, *[(), {}][len(link) - 1 :]]
    func, args, kwargs = parts
    return func, args, dict(kwargs)


def delete_group(group_id: str, tasks: bool = False, cached: bool = False) -> int:
    """From a group, remove the tasks that have ended; return their number.

    With ``tasks`` these tasks are deleted. Without ``tasks`` they stay in the store, with their
    results, and only leave the group. A tag of a job names its group, and a tag cannot change. So
    this function enqueues a job whose arguments are the ids of the tasks that left the group.
    ``split_group`` looks for such jobs.
    """
    mill = project_mill()
    ids = [task.id for task in split_group(group_id)[0]]
    if tasks:
        return sum(mill.broker.delete(ids))
    declare(mill)
    for start in range(0, len(ids), IDS_PER_JOB):
        call: Any = mill.call(UNGROUP, *ids[start : start + IDS_PER_JOB])
        mill.enqueue(call.using(tags=[ungrouped_tag(group_id)], result_ttl=KEPT_FOR))
    return len(ids)


# -- calls to prepare ------------------------------------------------------------------------------


class AsyncTask:
    """A call to prepare and run, which also reads its own result, as django-q's ``AsyncTask``."""

    def __init__(self, func: Func, *args: Any, **kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.options, self.kwargs = split_options(kwargs)
        self.id: str | None = None
        self.started = False

    def run(self) -> str:
        self.id = enqueue(call_of(self.func, self.args, self.kwargs, self.options), self.options)
        self.started = True
        return self.id

    def result(self, wait: int = 0) -> Any:
        """The result, after ``wait`` milliseconds at most."""
        return result(self.id, wait) if self.id else None

    def fetch(self, wait: int = 0) -> Task | None:
        """The task, after ``wait`` milliseconds at most."""
        return fetch(self.id, wait) if self.id else None


class Iter:
    """A function and the arguments of its calls, as django-q's ``Iter``."""

    def __init__(self, func: Func, args: Iterable[Any] | None = None, **kwargs: Any) -> None:
        self.func = func
        self.args = list(args or [])
        self.kwargs = kwargs
        self.id: str | None = None

    def append(self, *args: Any) -> int:
        """Add the arguments of one more call; returns the number of calls."""
        self.args.append(args)
        return self.length()

    def run(self) -> str:
        self.id = async_iter(self.func, self.args, **self.kwargs)
        return self.id

    def result(self, wait: int = 0) -> Any:
        """The list of results, after ``wait`` milliseconds at most."""
        return result(self.id, wait) if self.id else None

    def fetch(self, wait: int = 0) -> Task | None:
        """The task of all calls together."""
        return fetch(self.id, wait) if self.id else None

    def length(self) -> int:
        return len(self.args)


class Chain:
    """Calls that run one after the other, as django-q's ``Chain``."""

    def __init__(
        self, chain: Iterable[Any] | None = None, group: str | None = None, cached: Any = None
    ) -> None:
        self.chain = list(chain or [])
        self.group = group or new_id()
        self.cached = cached
        self.started = False

    def append(self, func: Func, *args: Any, **kwargs: Any) -> int:
        """Add a link; returns the number of links."""
        self.chain.append((func, args, kwargs))
        return self.length()

    def run(self) -> str:
        self.started = True
        return async_chain(self.chain, self.group, self.cached)

    def result(self, wait: int = 0) -> list[Any] | None:
        """The results of all links, after ``wait`` milliseconds at most."""
        return result_group(self.group, wait=wait, count=self.length()) if self.started else None

    def fetch(self, failures: bool = True, wait: int = 0) -> list[Task] | None:
        """The tasks of all links."""
        return fetch_group(self.group, failures, wait, self.length()) if self.started else None

    def current(self) -> int | None:
        """The number of links that have ended, plus one; None before the start."""
        return len(fetch_group(self.group)) + 1 if self.started else None

    def length(self) -> int:
        return len(self.chain)


# -- in the worker --------------------------------------------------------------------------------


def run(
    func: str, args: list[Any], kwargs: dict[str, Any], schedule: dict[str, Any] | None = None
) -> Any:
    """Call the function of a job. ``schedule`` has the fields of the job's schedule, if any.

    A job cannot add a hook to itself. So the job of a schedule with a hook enqueues the real call.
    """
    job, fields = this_job(None), schedule or {}
    if (name := fields.get("intended_date_kwarg")) and job is not None and job.planned is not None:
        kwargs = {**kwargs, name: job.planned.isoformat()}
    options = fields.get("options", {})
    if options.get("hook"):
        return enqueue(call_of(func, args, kwargs, options), options)
    return import_task(func)(*map(of_key, args), **{n: of_key(v) for n, v in kwargs.items()})


def hook(ended: Ended, func: str) -> None:
    import_task(func)(Task.of(project_mill(), ended.id) or Task.of_end(ended))


def ungroup(*task_ids: str) -> None:
    """Do nothing. The arguments record which tasks have left their group."""


def declare(mill: DjangoMill) -> None:
    """Declare the tasks that run the calls and the hooks, if the project uses django-q's names."""
    if uses_django_q() and RUN not in mill.tasks:
        mill.task(name=RUN)(run)
        mill.task(name=HOOK)(hook)
        mill.task(name=UNGROUP)(ungroup)
