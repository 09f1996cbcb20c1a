"""From a composition to jobs: which they are, what each waits for, and in what order they are put.

A job must be in the store before those it waits for name it as ``next``; so the plan goes from the
end to the start. Ids are derived from that of the whole: ``<id>.0000`` is the first step of a
chain, whose last step has the id itself; ``<id>.0000000`` is the first member of a group or node of
a flow, where the id itself is that of the job that stands for the group; ``<id>.on_failure`` is a
hook.

Members of a group that nothing comes before are put piece by piece: the group is held meanwhile.
They name no job but the group, which nothing but its own end can end; so a member may run, and
fail, before the next piece is there.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.compose import Chain, Composition, Flow, FlowNode, Group, Node, as_node, is_group
from tidemill.errors import InvalidOption
from tidemill.hooks import HOOKS
from tidemill.inputs import CENSUS, member_id
from tidemill.job import GROUP, Envelope, Links, Ref, Waits
from tidemill.task import Call

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["Piece", "Plan", "step_id"]


class Piece(NamedTuple):
    """Jobs to put at once.

    ``opens`` are groups among them that have members to come; ``closes`` those that have no more.
    """

    envelopes: list[Envelope]
    opens: list[str]
    closes: list[str]


class _Before(NamedTuple):
    """What comes before a node."""

    waits: str = ""
    inputs: tuple[str, ...] = ()
    first: Ref | None = None  # what its calls get as their first argument


_NOTHING = _Before()


def step_id(chain_id: str, index: int, count: int) -> str:
    """The id of a chain's step."""
    return chain_id if index == count - 1 else f"{chain_id}.{index:04d}"


class Plan:
    """The jobs of one composition."""

    def __init__(self, mill: Tidemill, node: Node, job_id: str) -> None:
        self._mill = mill
        self._node = node
        self._id = job_id
        self._open: list[tuple[str, Iterable[Node], int | None]] = []
        self._nodes: dict[FlowNode, str] = {}
        self._hooks: collections.Counter[tuple[str, str]] = collections.Counter()

    def pieces(self) -> Iterator[Piece]:
        """All jobs, each piece as a whole, in order."""
        return self._pieces(self._node, self._id, ())

    def _pieces(self, node: Node, job_id: str, next: tuple[str, ...]) -> Iterator[Piece]:
        envelopes = list(self._jobs(node, job_id, next, _NOTHING))
        opened, self._open = self._open, []
        yield Piece(envelopes, [group_id for group_id, *_ in opened], [])
        for group_id, members, count in opened:
            found = 0
            for member in members:
                yield from self._pieces(member, member_id(group_id, found), (group_id,))
                found += 1
            if count is None:
                yield Piece([self._census(group_id, found)], [], [group_id])
            elif count != found:
                raise InvalidOption(f"a group said it has {count} members, and has {found}")
            else:
                yield Piece([], [], [group_id])

    # -- nodes ----------------------------------------------------------------------------------

    def _jobs(
        self, node: Node, job_id: str, next: tuple[str, ...], before: _Before
    ) -> Iterator[Envelope]:
        """The jobs of a node, those behind first; members of a group that may come later left out.

        Its last job has ``job_id``, and ``next`` behind it.
        """
        if node is not self._node:
            _check_part(node)
        hooks = list(self._hook_jobs(node, job_id))
        yield from hooks
        next = (*next, *(hook.id for hook in hooks))
        if isinstance(node, Call):
            yield self._job(node, job_id, next, before)
        elif isinstance(node, Chain):
            yield from self._chain(node, job_id, next, before)
        elif isinstance(node, Group):
            yield from self._group(node, job_id, next, before)
        else:
            yield from self._flow(node, job_id, next, before)

    def _chain(
        self, node: Chain[Any], job_id: str, next: tuple[str, ...], before: _Before
    ) -> Iterator[Envelope]:
        count = len(node.steps)
        for index in reversed(range(count)):
            step, own = node.steps[index], step_id(job_id, index, count)
            if not index:
                yield from self._jobs(step, own, next, before)
                return
            first = _after(node.steps[index - 1], step_id(job_id, index - 1, count))
            yield from self._jobs(step, own, next, first)
            next = tuple(_entries(step, own))

    def _group(
        self, node: Group[Any], job_id: str, next: tuple[str, ...], before: _Before
    ) -> Iterator[Envelope]:
        if not before.waits:
            count = node.members.count()
            self._open.append((job_id, node.members, count))
            yield self._barrier(job_id, next, count, node.members.queue())
            return
        members = node.members.settle()
        yield self._barrier(job_id, next, len(members), node.members.queue())
        for index, member in enumerate(members):
            yield from self._jobs(member, member_id(job_id, index), (job_id,), before)

    def _flow(
        self, flow: Flow, job_id: str, next: tuple[str, ...], before: _Before
    ) -> Iterator[Envelope]:
        yield self._barrier(job_id, next, len(flow.nodes))
        self._nodes.update({part: member_id(job_id, part.index) for part in flow.nodes})
        behind: dict[FlowNode, list[str]] = {part: [job_id] for part in flow.nodes}
        for part in reversed(flow.nodes):
            own = self._nodes[part]
            first = _Before(part.waits) if part.after else before
            yield from self._jobs(part.node, own, tuple(behind[part]), first)
            for other in part.after:
                behind[other] += _entries(part.node, own)

    # -- jobs -----------------------------------------------------------------------------------

    def _job(
        self, call: Call[Any], job_id: str, next: tuple[str, ...], before: _Before
    ) -> Envelope:
        inputs = list(before.inputs)
        args = [self._referring(value, inputs) for value in call.args]
        kwargs = {name: self._referring(value, inputs) for name, value in call.kwargs.items()}
        if before.first is not None:
            args.insert(0, before.first)
            task = self._mill.tasks.get(call.task)
            if task is not None:
                task.arguments.check(args, kwargs)
            call = Call(call.task, tuple(args), kwargs, call.options)
        else:
            call = Call(call.task, tuple(args), kwargs, call.options, call.lacks)
        links = Links(next, before.waits, tuple(dict.fromkeys(inputs)))
        return self._mill.envelope(call, job_id, links)

    def _referring(self, value: Any, inputs: list[str]) -> Any:
        """An argument, with references where nodes of a flow were given."""
        if isinstance(value, FlowNode):
            job_id = self._nodes[value]
            inputs.append(job_id)
            return Ref((job_id,), is_group(value.node))
        if type(value) is list:
            return [self._referring(item, inputs) for item in value]
        if type(value) is tuple:
            return tuple([self._referring(item, inputs) for item in value])
        return value

    def _hook_jobs(self, node: Node, job_id: str) -> Iterator[Envelope]:
        for waits, given in node.hooks:
            hook = as_node(given)
            if not isinstance(hook, Call) or hook.hooks:
                raise InvalidOption(f"a hook is a task or a call without hooks, not {given!r}")
            _check_part(hook)
            name = HOOKS[waits]
            self._hooks[job_id, name] += 1
            number = self._hooks[job_id, name]
            own = f"{job_id}.{name}{number if number > 1 else ''}"
            ids = tuple(_trace(node, job_id))
            first = _Before(waits, ids, Ref(ids, is_group(node), ended=True))
            yield self._job(hook, own, (), first)

    def _barrier(
        self, job_id: str, next: tuple[str, ...], count: int | None, queue: str = "default"
    ) -> Envelope:
        links = Links(next, Waits.BARRIER)
        envelope = Envelope(id=job_id, queue=queue, task=GROUP, links=links)
        if count is not None:
            envelope.headers, envelope.text = {CENSUS: str(count)}, f"{count} members"
        return self._mill.seal(envelope)

    def _census(self, group_id: str, count: int) -> Envelope:
        """One member more, which says how many the others are, and ends at once."""
        envelope = self._barrier(f"{group_id}.{CENSUS}", (group_id,), count)
        envelope.text = f"{count} members of {group_id}"
        return envelope


def _after(node: Node, job_id: str) -> _Before:
    """What a step has before it: the one job, or the group, at the end of the step before."""
    return _Before(Waits.SUCCESS, (job_id,), Ref((job_id,), is_group(node)))


def _entries(node: Node, job_id: str) -> Iterator[str]:
    """Ids of the jobs of a node that wait for what is before it."""
    if isinstance(node, Call):
        yield job_id
    elif isinstance(node, Chain):
        yield from _entries(node.steps[0], step_id(job_id, 0, len(node.steps)))
    else:
        roots: Sequence[tuple[int, Node]] = (
            list(enumerate(node.members.settle()))
            if isinstance(node, Group)
            else [(part.index, part.node) for part in node.nodes if not part.after]
        )
        for index, member in roots:
            yield from _entries(member, member_id(job_id, index))
        if not roots:
            yield job_id


def _trace(node: Node, job_id: str) -> Iterator[str]:
    """Ids of the jobs that tell how a node ended: the first that did not succeed says why."""
    if isinstance(node, Chain):
        for index, step in enumerate(node.steps):
            yield from _trace(step, step_id(job_id, index, len(node.steps)))
    else:
        yield job_id


def _check_part(node: Node) -> None:
    """Refuse what only the whole may have."""
    named, txn = (
        (node.id, node.txn)
        if isinstance(node, Composition)
        else (node.options.id, node.options.txn)
    )
    if named:
        raise InvalidOption(
            f"{node!r} has the id {named!r}, but ids of parts follow from that of the whole: "
            "chain(…).using(id=…)"
        )
    if txn is not None:
        raise InvalidOption("txn= is for the whole: chain(…).using(txn=…)")
