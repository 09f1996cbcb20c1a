"""The workflow planner: turn a composition into jobs that name the jobs after them.

A job lists the jobs after it in ``next``. These jobs must be in the store first. So a plan goes
from the end of a composition to its start. The ids of the parts follow from the id of the
composition:

- ``<id>.0000`` is the first step of a chain. The last step has the id of the chain.
- ``<id>.0000000`` is the first member of a group, or the first node of a flow. The job that stands
  for the group has the id of the group.
- ``<id>.on_failure`` is a hook.

The members of a group at the start of a composition are put in pieces. The store holds the group
until the last piece is stored. The members have only the group in their ``next``. So a member may
run and fail before the next piece is stored.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemill.brokers.contract.inspection import GROUPS
from tidemill.client.compositions import MEMBER_COUNT, member_id
from tidemill.client.task import HOOKS, Call
from tidemill.core.codec import pack
from tidemill.core.envelope import Envelope, Links, Ref
from tidemill.core.job import GROUP, RunOn
from tidemill.core.words import counted
from tidemill.errors import InvalidOption
from tidemill.workflows.compose import (
    Chain,
    Composition,
    Flow,
    FlowNode,
    Group,
    Node,
    as_node,
    check_with_first,
    is_group,
)

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class Piece(NamedTuple):
    """Jobs that must go into the same put.

    ``opens`` are ids of groups in this piece whose members come in later pieces. ``closes`` are ids
    of groups that are complete with this piece.
    """

    envelopes: list[Envelope]
    opens: list[str]
    closes: list[str]


class _Before(NamedTuple):
    """The parents of a node."""

    waits: str = ""
    inputs: tuple[str, ...] = ()
    first: Ref | None = None  # the first argument of the node's calls


_NOTHING = _Before()


def step_id(chain: Chain[Any], chain_id: str, index: int) -> str:
    is_last = index == len(chain.steps) - 1
    return chain_id if is_last else f"{chain_id}.{chain.first + index:04d}"


class Plan:
    def __init__(self, runtime: Runtime, node: Node, job_id: str) -> None:
        self._runtime = runtime
        self._node = node
        self._id = job_id
        self._open: list[tuple[str, Iterable[Node], int | None]] = []
        self._nodes: dict[FlowNode, str] = {}
        self._hooks: collections.Counter[tuple[str, str]] = collections.Counter()

    def pieces(self) -> Iterator[Piece]:
        return self._pieces(self._node, self._id, ())

    def jobs(self) -> list[Envelope]:
        """All jobs in the order in which they must be put, for a single put."""
        return [job for piece in self.pieces() for job in piece.envelopes]

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
                yield Piece([self._count_job(group_id, found)], [], [group_id])
            elif count != found:
                raise InvalidOption(f"the length of a group is {count}, but it has {found} members")
            else:
                yield Piece([], [], [group_id])

    def _jobs(
        self,
        node: Node,
        job_id: str,
        next: tuple[str, ...],
        before: _Before,
        watched_by: tuple[str, ...] = (),
    ) -> Iterator[Envelope]:
        """The jobs of a node, from last to first, without members that come in later pieces."""
        # The last job of the node has the id ``job_id`` and the given ``next``. The hooks
        # ``watched_by`` wait for all steps of the node: somebody may cancel the last step of a
        # chain while an earlier step still runs.
        if node is not self._node:
            _check_part(node)
        hooks = list(self._hook_jobs(node, job_id))
        yield from hooks
        watched_by = (*watched_by, *(hook.id for hook in hooks))
        if isinstance(node, Chain):
            yield from self._chain(node, job_id, next, before, watched_by)
            return
        next = (*next, *watched_by)
        if isinstance(node, Call):
            yield self._job(node, job_id, next, before)
        elif isinstance(node, Group):
            yield from self._group(node, job_id, next, before)
        else:
            yield from self._flow(node, job_id, next, before)

    def _chain(
        self,
        node: Chain[Any],
        job_id: str,
        next: tuple[str, ...],
        before: _Before,
        watched_by: tuple[str, ...],
    ) -> Iterator[Envelope]:
        for index in reversed(range(len(node.steps))):
            step, own = node.steps[index], step_id(node, job_id, index)
            if not index:
                yield from self._jobs(step, own, next, before, watched_by)
                return
            first = _after(node.steps[index - 1], step_id(node, job_id, index - 1))
            yield from self._jobs(step, own, next, first, watched_by)
            next = tuple(_entries(step, own))

    def _group(
        self, node: Group[Any], job_id: str, next: tuple[str, ...], before: _Before
    ) -> Iterator[Envelope]:
        if not before.waits:
            count = node.members.count()
            self._open.append((job_id, node.members, count))
            yield self._barrier(job_id, next, count)
            return
        members = node.members.settle()
        yield self._barrier(job_id, next, len(members))
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

    def _job(
        self, call: Call[Any], job_id: str, next: tuple[str, ...], before: _Before
    ) -> Envelope:
        inputs = list(before.inputs)
        args = [self._referring(value, inputs) for value in call.args]
        kwargs = {name: self._referring(value, inputs) for name, value in call.kwargs.items()}
        if before.first is not None:
            args.insert(0, before.first)
            task = self._runtime.tasks.get(call.task)
            if task is not None:
                check_with_first(task, call, args, kwargs)
            call = Call(call.task, tuple(args), kwargs, call.options)
        else:
            call = Call(call.task, tuple(args), kwargs, call.options, call.missing)
        links = Links(next, before.waits, tuple(dict.fromkeys(inputs)))
        return self._runtime.envelope(call, job_id, links)

    def _referring(self, value: Any, inputs: list[str]) -> Any:
        """An argument with a reference in the place of each flow node."""
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
                raise InvalidOption(
                    f"a hook is a task or a plain call, and {given!r} is none, or has hooks of its "
                    "own; to go on after the end, nest the chain: chain(chain(…).on_failure(…), …)"
                )
            _check_part(hook)
            name = HOOKS[waits]
            self._hooks[job_id, name] += 1
            number = self._hooks[job_id, name]
            own = f"{job_id}.{name}{number if number > 1 else ''}"
            ids = tuple(_trace(node, job_id))
            first = _Before(waits, ids, Ref(ids, is_group(node), ended=True))
            yield self._job(hook, own, (), first)

    def _barrier(self, job_id: str, next: tuple[str, ...], count: int | None) -> Envelope:
        links = Links(next, RunOn.BARRIER)
        envelope = Envelope(id=job_id, queue=GROUPS, task=GROUP, links=links)
        if count is not None:
            envelope.headers, envelope.text = {MEMBER_COUNT: str(count)}, counted(count, "member")
            envelope.body = pack([[], {MEMBER_COUNT: count}])  # the signature covers the body
        return self._runtime.seal(envelope)

    def _count_job(self, group_id: str, count: int) -> Envelope:
        """An extra member of a group, which holds the number of members and ends at once."""
        envelope = self._barrier(f"{group_id}.{MEMBER_COUNT}", (group_id,), count)
        envelope.text = f"{counted(count, 'member')} of {group_id}"
        return envelope


def _after(node: Node, job_id: str) -> _Before:
    """The parent of a chain's step: the last job of the previous step, or its group."""
    return _Before(RunOn.SUCCESS, (job_id,), Ref((job_id,), is_group(node)))


def _entries(node: Node, job_id: str) -> Iterator[str]:
    """Ids of the first jobs of a node, which wait for the parents of the node."""
    if isinstance(node, Call):
        yield job_id
    elif isinstance(node, Chain):
        yield from _entries(node.steps[0], step_id(node, job_id, 0))
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
    """Ids of the jobs that decide how a node ends. The first failed job is the reason."""
    if isinstance(node, Chain):
        for index, step in enumerate(node.steps):
            yield from _trace(step, step_id(node, job_id, index))
    else:
        yield job_id


def _check_part(node: Node) -> None:
    named, txn = (
        (node.id, node.txn)
        if isinstance(node, Composition)
        else (node.options.id, node.options.txn)
    )
    if named:
        raise InvalidOption(
            f"{node!r} has the id {named!r}, but ids of parts follow from the id of the "
            "whole: chain(…).using(id=…); find a part by tags= or headers="
        )
    if txn is not None:
        raise InvalidOption("txn= is for the whole: chain(…).using(txn=…)")
