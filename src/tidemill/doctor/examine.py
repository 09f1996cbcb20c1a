"""All checks in order. ``tidemill doctor`` shows the report; the banners of the dashboard, the
notes of ``tidemill top`` and ``GET /v1/health`` show parts of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.doctor.disk import space, writable
from tidemill.doctor.findings import Finding, Seen
from tidemill.doctor.queues import asked_for, backlog, closed_limits, unknown_tasks
from tidemill.doctor.schedules import schedules
from tidemill.doctor.store import NOT_SYNCED, cleaning, durable, granted, here, policies, publishing
from tidemill.doctor.versions import same_versions
from tidemill.doctor.workers import alive, clocks, leases
from tidemill.errors import TidemillError

_Check = Callable[[Seen], Iterator[Finding]]

_ON_MESSAGE_BROKER: tuple[_Check, ...] = (publishing, durable, asked_for, policies)
_ON_STORE: tuple[_Check, ...] = (
    *(granted, writable, here, durable, cleaning, space, clocks, alive, same_versions),
    *(backlog, closed_limits, leases, unknown_tasks, schedules),
)
_ON_REQUEST = {writable, policies}  # commit or ask another server: only the doctor runs them
_OF_OPEN_STORE = {alive, backlog, closed_limits, unknown_tasks, schedules}
"""Checks whose remedies need workers: a store that moves to another store accepts no worker."""


def examine(mill: Tidemill) -> list[Finding]:
    seen = Seen(mill)
    return _run(seen, _checks(seen))


def problems(mill: Tidemill) -> list[Finding]:
    """What is wrong now, the worst first. This changes nothing, and takes milliseconds."""
    seen = Seen(mill)
    checks = [check for check in _checks(seen) if check not in _ON_REQUEST]
    found = [finding for finding in _run(seen, checks) if finding.status != "ok"]
    chosen = [finding for finding in found if finding.message == NOT_SYNCED]
    return sorted((one for one in found if one not in chosen), key=lambda one: one.status != "fail")


def notes(seen: Seen) -> dict[str, Finding]:
    """The first problem of each queue that has one."""
    knows = Feature.INSPECT in seen.broker.features
    checks = (closed_limits, backlog) if knows else (asked_for,)
    found: dict[str, Finding] = {}
    for finding in _run(seen, checks):
        if finding.queue:
            found.setdefault(finding.queue, finding)
    return found


def _checks(seen: Seen) -> Sequence[_Check]:
    if Feature.INSPECT not in seen.broker.features:
        return _ON_MESSAGE_BROKER
    with contextlib.suppress(TidemillError):  # the check of the move reports the error
        if seen.info.get("moves_to"):
            return [check for check in _ON_STORE if check not in _OF_OPEN_STORE]
    return _ON_STORE


def _run(seen: Seen, checks: Iterable[_Check]) -> list[Finding]:
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(seen)
        except TidemillError as error:
            name = check.__name__
            findings.append(Finding(name, "fail", str(error), "the message names the problem"))
    return findings
