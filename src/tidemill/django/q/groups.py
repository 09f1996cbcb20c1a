"""``async_iter``, ``async_chain`` and ``delete_group``, and the classes that prepare calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tidemill.core.clock import new_id
from tidemill.django.project import project_mill
from tidemill.django.q.calls import HOOK, call_of, declare, enqueue, path_of, split_options
from tidemill.django.q.results import (
    UNGROUP,
    Task,
    fetch,
    fetch_group,
    result,
    result_group,
    split_group,
    ungrouped_tag,
)
from tidemill.errors import InvalidOption
from tidemill.workflows.compose import Flow, group

Func = Callable[..., Any] | str

IDS_PER_JOB = 1000
"""The most ids that one job of ``delete_group`` names."""

KEPT_FOR = 30 * 86400.0
"""Seconds for which the store remembers that a task has left its group."""


def async_iter(func: Func, args_iter: Iterable[Any], **kwargs: Any) -> str:
    """Enqueue a call for each item; return the id of a task whose result lists all results."""
    options, kwargs = split_options(kwargs)
    own = {name: value for name, value in options.items() if name not in ("hook", "task_name")}
    calls = [call_of(func, _tuple(args), kwargs, own) for args in args_iter]
    if not calls:
        raise InvalidOption("async_iter needs at least one tuple of arguments")
    all_of_them: Any = group(calls)
    if hook := options.get("hook"):
        all_of_them = all_of_them.on_complete(project_mill().call(HOOK, path_of(hook)))
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


class AsyncTask:
    """A call to prepare and run, which also reads its own result, as django-q's ``AsyncTask``."""

    def __init__(self, func: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.options, self.kwargs = split_options(kwargs)
        self.id: str | None = None
        self.started = False

    def run(self) -> str:
        """Enqueue the call."""
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
        """Enqueue the calls."""
        self.id = async_iter(self.func, self.args, **self.kwargs)
        return self.id

    def result(self, wait: int = 0) -> Any:
        """The list of results, after ``wait`` milliseconds at most."""
        return result(self.id, wait) if self.id else None

    def fetch(self, wait: int = 0) -> Task | None:
        """The task of all calls together."""
        return fetch(self.id, wait) if self.id else None

    def length(self) -> int:
        """The number of calls."""
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
        """Enqueue the chain."""
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
        """The number of links."""
        return len(self.chain)
