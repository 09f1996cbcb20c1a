"""``async_task``: enqueue a call of any function, by the function or its dotted path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tidemill.client.context import this_job
from tidemill.client.task import Call, Ended, import_task
from tidemill.core.clock import new_id
from tidemill.django.cluster import cluster, task_defaults, uses_django_q
from tidemill.django.project import DjangoMill, on_connections, project_mill
from tidemill.django.q.results import UNGROUP, Task, group_tag, name_tag
from tidemill.errors import InvalidOption
from tidemill.worker.inline import run_composed, run_inline

RUN, HOOK = "tidemill.django.q.run", "tidemill.django.q.hook"

OPTIONS = (
    *("hook", "group", "timeout", "save", "sync", "cached", "broker", "cluster", "task_name"),
    *("ack_failure", "iter_count", "iter_cached", "chain", "priority"),
)
"""The keywords of ``async_task`` that are not arguments of the function."""

Options = dict[str, Any]


def async_task(func: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> str:
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


def path_of(func: Callable[..., Any] | str) -> str:
    """The dotted path of a function.

    Raises:
        InvalidOption: no worker could find the function.
    """
    if isinstance(func, str):
        return func
    name = getattr(func, "__qualname__", "")
    module = getattr(func, "__module__", "") or ""
    if not name or "<" in name or not module:
        raise InvalidOption(f"{func!r} has no dotted path by which a worker could find it")
    return f"{module}.{name}"


def call_of(
    func: Callable[..., Any] | str, args: Any, kwargs: Mapping[str, Any], options: Options
) -> Call[Any]:
    """The call of the job.

    Raises:
        InvalidOption: the setting ``Q_CLUSTER`` is missing.
    """
    if not uses_django_q():
        raise InvalidOption(
            "tidemill.django.q lets jobs name any function; to allow that, add the setting "
            "Q_CLUSTER = {}"
        )
    declare(project_mill())
    call: Call[Any] = project_mill().call(RUN, path_of(func), list(args), dict(kwargs))
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
        call = call.on_complete(project_mill().call(HOOK, path_of(hook)))
    return call


def enqueue(call: Any, options: Options) -> str:
    """Enqueue a call, or run it now for ``sync``, and return its id."""
    mill = project_mill()
    if not (options.get("sync") or cluster().get("sync") or mill.sync):
        return str(mill.enqueue(call).id)
    job_id = new_id()
    try:
        if isinstance(call, Call) and not call.hooks:
            on_connections(lambda: run_inline(mill.runtime, call, job_id=job_id))
        else:
            named = call.using(id=job_id)
            on_connections(lambda: run_composed(mill.runtime, named))
    except Exception:
        if mill.runtime.inline_jobs.get(job_id) is None:
            raise
    return job_id


# -- in the worker --------------------------------------------------------------------------------


def run(func: str, args: list[Any], kwargs: dict[str, Any], planned_as: str = "") -> Any:
    """Call the function of a job. ``planned_as`` names the keyword for the scheduled time."""
    job = this_job(None)
    if planned_as and job is not None and job.planned is not None:
        kwargs = {**kwargs, planned_as: job.planned.isoformat()}
    return import_task(func)(*args, **kwargs)


def hook(ended: Ended, func: str) -> None:
    """Call the function of a hook with the task that has ended."""
    mill = project_mill()
    import_task(func)(Task.of(mill, ended.id) or Task.of_end(ended))


def ungroup(*task_ids: str) -> None:
    """Do nothing. The arguments record which tasks have left their group."""


def declare(mill: DjangoMill) -> None:
    """Declare the tasks that run the calls and the hooks, if the project uses django-q's names."""
    if uses_django_q() and RUN not in mill.tasks:
        mill.task(name=RUN)(run)
        mill.task(name=HOOK)(hook)
        mill.task(name=UNGROUP)(ungroup)
