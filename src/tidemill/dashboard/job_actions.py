"""Actions on jobs by id: retry, cancel, terminate, alter, delete; and the reasons of refusals."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.client.compositions import alter_jobs, cancel_jobs, delete_jobs, retry_jobs
from tidemill.client.explain import why_not_altered, why_not_run
from tidemill.core.job import WAITING_STATES, State
from tidemill.dashboard.roles import Role
from tidemill.dashboard.target import Target

RETRY_FIRST = 5
"""The number of failed jobs that are retried first. If these jobs succeed, the others follow."""

_EXPLAINED = 20


class Action(NamedTuple):
    """An action on jobs: its words, icon and function, the role it needs, and states of its jobs.

    An action with ``asks`` needs a target. A separate page asks the user for the target.
    """

    label: str
    past: str
    icon: str
    role: Role
    states: frozenset[State]
    do: Callable[[Tidemill, Sequence[str], Target], list[bool]]
    question: str = ""
    asks: bool = False


_UNFINISHED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})

ACTIONS = {
    "retry": Action(
        *("Retry", "retried", "retry", Role.OPERATOR),
        frozenset({State.FAILED, State.CANCELLED, State.EXPIRED, State.SCHEDULED}),
        lambda mill, ids, _: retry_jobs(mill.runtime, ids),
    ),
    "cancel": Action(
        *("Cancel", "cancelled", "ban", Role.OPERATOR, _UNFINISHED),
        lambda mill, ids, _: cancel_jobs(mill.runtime, ids),
        "Cancel? Jobs that have not started never will; running jobs are asked to stop.",
    ),
    "terminate": Action(
        *("Stop now", "stopped", "stop", Role.OPERATOR, _UNFINISHED),
        lambda mill, ids, _: cancel_jobs(mill.runtime, ids, terminate=True),
        "Stop now? Running jobs are interrupted within a second.",
    ),
    "alter": Action(
        *("Change queue or priority", "altered", "up", Role.OPERATOR, WAITING_STATES),
        lambda mill, ids, to: alter_jobs(mill.runtime, ids, rank=to.rank, queue=to.queue),
        asks=True,
    ),
    "delete": Action(
        *("Delete", "deleted", "trash", Role.OPERATOR, frozenset(State)),
        lambda mill, ids, _: delete_jobs(mill.runtime, ids),
        "Delete? The jobs are gone with their results, in any state.",
    ),
}
"""The actions on jobs, by name."""


class Done(NamedTuple):
    """What an action did: the number of jobs changed and refused, and the most frequent reasons."""

    done: int
    refused: int
    reasons: list[tuple[str, int]]

    def text(self, name: str) -> str:
        """The outcome in a sentence."""
        text = f"{ACTIONS[name].past} {self.done:,} job{'' if self.done == 1 else 's'}"
        if self.refused:
            reasons = "; ".join(reason for reason, _ in self.reasons)
            text += f"; {self.refused:,} refused: {reasons}"
        return text


def act(
    mill: Tidemill,
    name: str,
    ids: Sequence[str],
    target: Target = Target(),  # noqa: B008 - frozen
) -> Done:
    """Act on jobs in one call of the store.

    Raises:
        BrokerUnavailable: the store cannot be reached; the jobs may have been changed.
        FeatureMissing: the broker cannot do this.
    """
    unique = list(dict.fromkeys(ids))
    if name == "alter":
        mill.runtime.features.need(Feature.ALTER, "alter")
    answers = ACTIONS[name].do(mill, unique, target)
    refused = [job_id for job_id, answer in zip(unique, answers, strict=True) if not answer]
    reasons = collections.Counter(
        _why(mill, name, job_id, target) for job_id in refused[:_EXPLAINED]
    )
    return Done(sum(answers), len(refused), reasons.most_common(3))


def _why(mill: Tidemill, name: str, job_id: str, target: Target) -> str:
    """Why a job was refused. The text leaves out the key of the job, which may be secret."""
    record = mill.broker.get(job_id)
    if record is None:
        return "it is no longer kept"
    if name == "retry":
        return why_not_run(mill.runtime, record).replace(f" {record.envelope.key!r}", "")
    if name == "alter":
        return why_not_altered(record, target.queue)
    return f"it {record.state} already" if record.state.finished else f"it is {record.state}"
