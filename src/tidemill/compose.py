"""Compositions: chains, groups and flows of calls, to be enqueued as one.

What is in here is plain data, made before anything is stored; :mod:`.plan` makes jobs of it.
Compositions nest freely: a step of a chain, a member of a group, a node of a flow may each be a
call or another composition.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import Any, Generic, Self, TypeVar, overload

from tidemill.config import check_name
from tidemill.errors import InvalidOption
from tidemill.groups import JobChain, JobGroup
from tidemill.hooks import Hooked
from tidemill.job import Waits
from tidemill.task import Call, Configured, Task

__all__ = [
    "Chain",
    "Composition",
    "Flow",
    "FlowNode",
    "Group",
    "Node",
    "Step",
    "as_node",
    "calls_in",
    "chain",
    "group",
    "is_group",
    "map_many",
]

H = TypeVar("H")
R = TypeVar("R")

LOOK_AHEAD = 1000
"""Members of an iterator that are held in memory, to know how many there are."""

MOST_BEHIND = 10_000
"""Members of a group that begins when something else has ended, which has to name them all."""


class Composition(Hooked, Generic[H]):
    """What chains, groups and flows have in common; ``H`` is the handle that enqueueing gives."""

    def __init__(self) -> None:
        super().__init__()
        self.id = ""
        self.txn: Any = None

    def using(self, *, id: str | None = None, txn: Any = None) -> Self:
        """A copy with an id of its own, or stored in the caller's transaction."""
        changed = copy.copy(self)
        if id is not None:
            changed.id = check_name("id", id)
        if txn is not None:
            changed.txn = txn
        return changed


class Chain(Composition[JobChain[R]], Generic[R]):
    """Steps, one after the other."""

    def __init__(self, steps: Sequence[Node]) -> None:
        super().__init__()
        self.steps = tuple(steps)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.steps))})"


class _Members:
    """The members of a group and of its copies, which may come from an iterator, once."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given
        self._once = not isinstance(given, Collection)
        self._taken = False
        self._first: Any = None

    def queue(self) -> str:
        """The queue of the first member, for the job that stands for the group; once counted."""
        first = self._first
        if isinstance(self._given, Collection):
            first = next(iter(self._given), None)
        if isinstance(first, (Task, Configured, Call)):
            # Of one call a step is made, which has options; the other nodes have none.
            return as_node(first).options.queue  # type: ignore[union-attr]
        return "default"

    def count(self) -> int | None:
        """How many there are; None if that is known only at their end."""
        if self._once:
            members = iter(self)
            head = list(itertools.islice(members, LOOK_AHEAD))
            if len(head) == LOOK_AHEAD:
                self._first = head[0]
                self._given, self._taken = itertools.chain(head, members), False
                return None
            self._given, self._once = head, False
        assert isinstance(self._given, Sized)
        return len(self._given)

    def settle(self) -> list[Node]:
        """All of them, held in memory from now on.

        Raises:
            InvalidOption: there are too many to begin when something else has ended.
        """
        if not isinstance(self._given, list):
            self._given, self._once = list(itertools.islice(iter(self), MOST_BEHIND + 1)), False
        if len(self._given) > MOST_BEHIND:
            raise InvalidOption(
                f"a group that comes after something has at most {MOST_BEHIND} members; enqueue a "
                "larger one from a task, or make it the first"
            )
        self._given = [as_node(member) for member in self._given]
        return self._given

    def __iter__(self) -> Iterator[Node]:
        if self._once:
            if self._taken:
                raise InvalidOption("this group was made of an iterator, and was enqueued before")
            self._taken = True
        return map(as_node, self._given)


class Group(Composition[JobGroup[R]], Generic[R]):
    """Members that run side by side."""

    def __init__(self, members: Iterable[Any]) -> None:
        super().__init__()
        self.members = _Members(members)

    def __repr__(self) -> str:
        return "<group of calls>"


class FlowNode:
    """A node of a flow; given as an argument of a later call, it stands for its result."""

    __slots__ = ("after", "index", "node", "waits")

    def __init__(self, index: int, node: Node, after: Sequence[FlowNode], waits: Waits) -> None:
        self.index = index
        self.node = node
        self.after = tuple(after)
        self.waits = waits

    def __repr__(self) -> str:
        return f"<node {self.index}>"


class Flow(Composition[JobGroup[Any]]):
    """Calls that depend on each other in any way that has no circle."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[FlowNode] = []

    def add(
        self, call: Step, /, *, after: Iterable[FlowNode] = (), waits: str = "success"
    ) -> FlowNode:
        """Add a call. It comes after the nodes among its arguments, and after those of ``after``.

        ``waits="any"`` runs it also when some of those did not succeed: their results are None.

        Raises:
            InvalidOption: a node is of another flow.
        """
        if waits not in (Waits.SUCCESS, Waits.ANY):
            raise InvalidOption(f"waits must be success or any, not {waits!r}")
        node = as_node(call)
        before = [*after, *itertools.chain(*(_nodes_in(part) for part in calls_in(node)))]
        for other in before:
            if not any(other is mine for mine in self.nodes):
                raise InvalidOption(f"{other!r} comes before {call!r}, and is no node of this flow")
        made = FlowNode(len(self.nodes), node, list(dict.fromkeys(before)), Waits(waits))
        self.nodes.append(made)
        return made

    def __repr__(self) -> str:
        return f"<flow of {len(self.nodes)} nodes>"


Node = Call[Any] | Chain[Any] | Group[Any] | Flow
Step = Node | Task[..., Any] | Configured[..., Any, Any]


def chain(*steps: Step) -> Chain[Any]:
    """Run calls one after the other; each gets the result before it as its first argument.

    A step without further arguments may be given as the task itself. What follows a group gets the
    list of its results. When a step fails for good those after it are cancelled.

    Raises:
        InvalidOption: there is no step, or one is no call.
    """
    if not steps:
        raise InvalidOption("a chain needs at least one call")
    return Chain([as_node(step) for step in steps])


@overload
def group(calls: Iterable[Call[R]]) -> Group[R]: ...
@overload
def group(calls: Iterable[Step]) -> Group[Any]: ...
def group(calls: Iterable[Any]) -> Group[Any]:
    """Run calls side by side. Any iterable will do; a long one is stored piece by piece."""
    if isinstance(calls, (Call, Composition, Task, Configured)):
        raise InvalidOption(f"group takes a list of calls, not {calls!r}")
    if isinstance(calls, (list, tuple)):
        return Group([as_node(call) for call in calls])
    return Group(calls)


def map_many(task: Task[..., R] | Configured[..., R, Any], arguments: Iterable[Any]) -> Group[R]:
    """A group of one task's calls, one for each of the arguments; a tuple is spread."""
    sized = isinstance(arguments, Sized)
    return Group(_Mapped(task, arguments) if sized else _map(task, arguments))


def _map(task: Any, arguments: Iterable[Any]) -> Iterator[Call[Any]]:
    for given in arguments:
        yield task.call(*given) if isinstance(given, tuple) else task.call(given)


class _Mapped(Collection[Any]):
    def __init__(self, task: Any, arguments: Any) -> None:
        self._task = task
        self._arguments = arguments

    def __len__(self) -> int:
        return len(self._arguments)

    def __iter__(self) -> Iterator[Call[Any]]:
        return _map(self._task, self._arguments)

    def __contains__(self, call: object) -> bool:
        return any(call is mine for mine in self)


def as_node(step: Any) -> Node:
    """What a user gave as a part of a composition.

    Raises:
        InvalidOption: it is no call.
    """
    if isinstance(step, (Chain, Group, Flow)):
        return step
    if isinstance(step, (Task, Configured)):
        step = step.call()
    if not isinstance(step, Call):
        raise InvalidOption(f"a composition takes task.call(…), not {step!r}")
    if step.options.key:
        raise InvalidOption(
            f"{step!r} has the key {step.options.key!r}: a part of a composition runs when what is "
            "before it has ended, and can have none"
        )
    return step


def is_group(node: Node) -> bool:
    """True when the result is a list of those of many jobs."""
    if isinstance(node, Chain):
        return is_group(node.steps[-1])
    return isinstance(node, (Group, Flow))


def calls_in(node: Node) -> Iterator[Call[Any]]:
    """Every call of a node, hooks left out; a group of an iterator is then held in memory."""
    if isinstance(node, Call):
        yield node
    elif isinstance(node, Flow):
        for part in node.nodes:
            yield from calls_in(part.node)
    else:
        for inner in node.steps if isinstance(node, Chain) else node.members.settle():
            yield from calls_in(inner)


def _nodes_in(call: Call[Any]) -> Iterator[FlowNode]:
    def look(value: Any) -> Iterator[FlowNode]:
        if isinstance(value, FlowNode):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from look(item)

    yield from look([*call.args, *call.kwargs.values()])
