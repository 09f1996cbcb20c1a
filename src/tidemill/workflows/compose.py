"""Compose chains, groups and flows of calls, which are enqueued as a whole.

Compositions are plain values; :mod:`.planner` turns them into jobs. Compositions nest: the parts of
a chain, a group or a flow are calls or other compositions.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, Literal, Self, TypeVar, overload

from tidemill.client.task import Call, Configured, Ended, Hooked, PartialCall
from tidemill.core.config import check_name
from tidemill.core.envelope import Ref
from tidemill.core.job import RunOn
from tidemill.errors import InvalidOption
from tidemill.workflows.handles import JobChain, JobGroup

H = TypeVar("H")
R = TypeVar("R")

LOOK_AHEAD = 1000  # members read ahead from an iterator; a smaller group has a known size
MOST_AFTER_PARENT = 10_000  # members of a group after other jobs, each of which names them all


class Composition(Hooked, Generic[H]):
    """The base of chains, groups and flows; ``H`` is the type of the handle."""

    def __init__(self) -> None:
        super().__init__()
        self.id = ""
        self.txn: Any = None

    def using(self, *, id: str | None = None, txn: Any = None) -> Self:
        """A copy with an id, or with the caller's transaction in which it is stored.

        Raises:
            InvalidOption: the id cannot be used.
        """
        changed = copy.copy(self)
        if id is not None:
            changed.id = check_name("id", id)
        if txn is not None:
            changed.txn = txn
        return changed


class Chain(Composition[JobChain[R]], Generic[R]):
    """Steps that run one after the other: the value that :func:`chain` returns."""

    def __init__(self, steps: Sequence[Node]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.first = 0  # the number of the first step in the ids of the steps

    def _numbered(self, first: int) -> Self:
        """A copy with other numbers. A chain that ends with a chain gives its id to both."""
        changed, last = copy.copy(self), self.steps[-1]
        changed.first = first
        if isinstance(last, Chain):
            changed.steps = (*self.steps[:-1], last._numbered(first + len(self.steps) - 1))
        return changed

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.steps))})"


class _Members:
    """The members of a group. Copies of the group share them. An iterator gives them only once."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given
        self._once = not isinstance(given, Collection)
        self._taken = False

    def count(self) -> int | None:
        """The number of members; None for a long iterator, whose end is not known yet."""
        if self._once:
            members = iter(self)
            head = list(itertools.islice(members, LOOK_AHEAD))
            if len(head) == LOOK_AHEAD:
                self._given, self._taken = itertools.chain(head, members), False
                return None
            self._given, self._once = head, False
        assert isinstance(self._given, Sized)
        return len(self._given)

    def settle(self) -> list[Node]:
        """All members as a list, in memory. Raises InvalidOption for too many after other jobs."""
        if not isinstance(self._given, list):
            self._given, self._once = (
                list(itertools.islice(iter(self), MOST_AFTER_PARENT + 1)),
                False,
            )
        if len(self._given) > MOST_AFTER_PARENT:
            raise InvalidOption(
                f"a group that follows other jobs has at most {MOST_AFTER_PARENT} members; "
                "enqueue a larger group from a task, or put it first"
            )
        self._given = [as_node(member) for member in self._given]
        return self._given

    def __iter__(self) -> Iterator[Node]:
        if self._once:
            if self._taken:
                raise InvalidOption("this group has an iterator, which a first enqueue has used up")
            self._taken = True
        return map(as_node, self._given)


class Group(Composition[JobGroup[R]], Generic[R]):
    """Members that run side by side: the value that :func:`group` or :func:`map_many` returns."""

    def __init__(self, members: Iterable[Any]) -> None:
        super().__init__()
        self.members = _Members(members)

    def __repr__(self) -> str:
        return "<group of calls>"


class FlowNode:
    """A node of a flow. As an argument of a later call it stands for the node's result."""

    __slots__ = ("after", "index", "node", "waits")

    def __init__(self, index: int, node: Node, after: Sequence[FlowNode], waits: RunOn) -> None:
        self.index = index
        self.node = node
        self.after = tuple(after)
        self.waits = waits

    def __repr__(self) -> str:
        return f"<node {self.index}>"


class Flow(Composition[JobGroup[Any]]):
    """Calls that depend on each other, without a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[FlowNode] = []

    @overload
    def add(
        self,
        call: Call[R] | Configured[..., R, Any],
        /,
        *,
        after: Iterable[Any] = (),
        waits: Literal["success", "any"] = "success",
    ) -> R: ...
    @overload
    def add(
        self,
        call: Step,
        /,
        *,
        after: Iterable[Any] = (),
        waits: Literal["success", "any"] = "success",
    ) -> Any: ...
    def add(self, call: Step, /, *, after: Iterable[FlowNode] = (), waits: str = "success") -> Any:
        """Add a call, which runs after the nodes among its arguments and the nodes of ``after``.

        Returns a :class:`FlowNode`. As an argument of a later call, the node stands for the result
        of this call. So type checkers see the node as a value of the result's type.

        With ``waits="any"`` the call also runs after failures. A missing result is then None.

        Raises:
            InvalidOption: a node belongs to another flow, or ``waits`` has another value.
        """
        if waits not in (RunOn.SUCCESS, RunOn.ANY):
            raise InvalidOption(f"waits must be success or any, not {waits!r}")
        node = as_node(call)
        before = [*after, *itertools.chain(*(_nodes_in(part) for part in calls_in(node)))]
        for other in before:
            if not any(other is mine for mine in self.nodes):
                raise InvalidOption(f"{other!r} is before {call!r}, but is no node of this flow")
        made = FlowNode(len(self.nodes), node, list(dict.fromkeys(before)), RunOn(waits))
        self.nodes.append(made)
        return made

    def __repr__(self) -> str:
        return f"<flow of {len(self.nodes)} nodes>"


Node = Call[Any] | Chain[Any] | Group[Any] | Flow
Step = Node | PartialCall[Any] | Configured[..., Any, Any]


def chain(*steps: Step) -> Chain[Any]:
    """Run calls one after the other. Each call gets the previous result as its first argument.

    A step without further arguments may be the task itself. A step after a group gets the list of
    the group's results. A final failure of a step cancels the steps after it.

    Raises:
        InvalidOption: there is no step, or a step is no call.
    """
    if not steps:
        raise InvalidOption("a chain needs at least one call")
    return Chain([as_node(step) for step in steps])._numbered(0)


@overload
def group(calls: Iterable[Call[R]]) -> Group[R]: ...
@overload
def group(calls: Iterable[Step]) -> Group[Any]: ...
def group(calls: Iterable[Any]) -> Group[Any]:
    """Run calls side by side. The calls may be any iterable; a long group is stored in pieces.

    Raises:
        InvalidOption: a single call is given instead of a list of calls.
    """
    if isinstance(calls, (Call, Composition, Configured)):
        raise InvalidOption(f"group takes a list of calls, not {calls!r}")
    if isinstance(calls, (list, tuple)):
        return Group([as_node(call) for call in calls])
    return Group(calls)


def map_many(task: Configured[..., R, Any], arguments: Iterable[Any]) -> Group[R]:
    """A group with one call of a task for each item. A tuple gives several arguments."""
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
    """A part of a composition as a node: a task becomes a call. Raises InvalidOption."""
    if isinstance(step, (Chain, Group, Flow)):
        return step
    if isinstance(step, Configured):
        step = step.call()
    if not isinstance(step, Call):
        raise InvalidOption(f"a composition takes task.call(…), not {step!r}")
    if (key := step.options.key) is not None:
        raise InvalidOption(
            f"{step!r} has the key {key.name!r}: a part of a composition can have no key, "
            "because it runs when the parts before it have ended"
        )
    return step


def check_with_first(
    task: Configured[..., Any, Any], call: Call[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise TypeError if the task does not take the arguments of a step or hook."""
    try:
        task.arguments.check(args, kwargs)
    except TypeError as error:
        if call.missing is not None:
            raise
        first = args[0]
        hook = isinstance(first, Ended) or (isinstance(first, Ref) and first.ended)
        name = task.function.__name__
        raise TypeError(
            f"{error}; "
            + (
                "a hook gets an Ended as its first argument: add a parameter for it"
                if hook
                else "a chain passes the previous result as the first argument: add a parameter "
                f"for it, or use a flow, flow.add({name}.call(…), after=[node])"
            )
        ) from None


def is_group(node: Node) -> bool:
    if isinstance(node, Chain):
        return is_group(node.steps[-1])
    return isinstance(node, (Group, Flow))


def calls_in(node: Node) -> Iterator[Call[Any]]:
    """All calls of a node except hooks. This keeps the members of a group in memory."""
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
