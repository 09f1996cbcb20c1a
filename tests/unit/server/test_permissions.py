"""The contract calls that need an admin's token, and the sentences for workers without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from moved_clock import MovedClock

from tidemill import Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.rpc import Role
from tidemill.brokers.contract.schedules import DECLARATION, Change
from tidemill.brokers.memory import MemoryBroker
from tidemill.core.clock import new_id
from tidemill.core.envelope import LimitSettings
from tidemill.core.job import Command, Owner
from tidemill.schedules import record as kept
from tidemill.server.http.broker_rpc import needed
from tidemill.server.http.receipts import new_owner_id
from tidemill.worker.child_protocol import Hello
from tidemill.worker.declarations import TaskDeclarations
from tidemill.worker.scheduling import Scheduling


class Noting(MemoryBroker):
    """Notes the roles that its calls would have taken."""

    def __init__(self) -> None:
        super().__init__()
        self.roles: list[str] = []

    def change_schedules(self, changes: Sequence[Change]) -> Any:
        self.roles.append(needed(self, "change_schedules", {"changes": changes}))
        return super().change_schedules(changes)

    def set_limit(self, name: str, terms: LimitSettings | None, **how: Any) -> None:
        arguments = {"terms": terms, "declared": False, **how}
        self.roles.append(needed(self, "set_limit", arguments))
        super().set_limit(name, terms, **how)

    def took(self) -> list[str]:
        roles, self.roles = self.roles, []
        return roles


@pytest.fixture
def broker() -> Noting:
    return Noting()


@pytest.fixture
def mill(broker: Noting) -> Tidemill:
    mill = Tidemill("memory://")
    mill.runtime._broker = broker

    @mill.task(limit=None)
    def tick() -> None: ...

    return mill


def test_limits_are_declared_by_an_operator_and_set_by_an_admin(
    mill: Tidemill, broker: Noting
) -> None:
    mill.queue("q", rate="5/s")
    assert broker.took() == [Role.OPERATOR]
    mill.limits.set_queue("q", rate="7/s")
    mill.limits.set("named", concurrency=1)
    mill.limits.reset("named")
    assert broker.took() == [Role.ADMIN] * 3


def test_schedules_are_added_and_removed_by_an_admin(mill: Tidemill, broker: Noting) -> None:
    call = next(iter(mill.tasks.values())).call()
    mill.schedules.add("s", call, 60)
    assert broker.took() == [Role.ADMIN]
    mill.schedules.pause("s")
    mill.schedules.resume("s")
    assert broker.took() == [Role.OPERATOR] * 2
    mill.schedules.pause("s")
    broker.took()
    mill.schedules.remove("s")
    assert broker.took() == [Role.ADMIN]


def test_a_worker_declares_fires_and_withdraws_as_an_operator(
    mill: Tidemill, broker: Noting, moved_clock: MovedClock
) -> None:
    # given a worker, and what its code declares
    call = next(iter(mill.tasks.values())).call()
    mill.schedule("often", call, 0.01)
    mill.schedule("once", call, every=0.01, repeats=1)
    owner = Owner(id=new_id(), kind="worker", name="w")
    broker.attach(owner)
    firing = Scheduling("app", owner.id)
    firing.declare(broker, Hello(schedules=mill.runtime.code_schedules.bodies()))
    # when they fire, the last time too, are withdrawn, put aside, and forgotten
    due = [record for record in broker.schedules(["often", "once"]) if record is not None]
    moved_clock.advance(60)
    firing.fire(broker, due)
    firing.declare(broker, Hello())
    for seconds in (60, 3 * kept.FORGET):
        moved_clock.advance(seconds)
        (record,) = broker.schedules(["often"])
        assert record is not None
        firing.fire(broker, [record])
    # then
    assert broker.schedules(["often"]) == [None]
    assert set(broker.took()) == {Role.OPERATOR}


def test_a_worker_declares_renews_and_removes_the_options_of_tasks_as_an_operator(
    mill: Tidemill, broker: Noting
) -> None:
    worker, hello = TaskDeclarations(), Hello(declared=mill.runtime.declarations.own())
    worker.declare(broker, hello)
    due = broker.list_schedules(DECLARATION, 10)
    assert len(due) == 1
    worker.expire(broker, due)
    TaskDeclarations().expire(broker, broker.list_schedules(DECLARATION, 10))
    assert broker.list_schedules(DECLARATION, 10) == []
    assert broker.took() == [Role.OPERATOR] * 3


def test_only_an_admin_acts_for_the_shared_owner_of_a_server(broker: Broker) -> None:
    # given a shared owner of a server, which has a lease, and a remote worker
    shared_owner = Owner(id=new_owner_id(), kind="consumer", name="server", lease=30)
    worker = Owner(id=new_id(), kind="worker", name="w", lease=30)
    for owner, role in [(shared_owner, Role.ADMIN), (worker, Role.OPERATOR)]:
        broker.attach(owner)
        for name, arguments in [
            ("attach", {"owner": owner}),
            ("detach", {"owner_id": owner.id}),
            ("release", {"owner_id": owner.id, "causes": None}),
            ("exchange", {"step": Step(owner.id)}),
            ("command", {"owner_id": owner.id, "command": Command("stop")}),
        ]:
            # then what is said in its name takes the token of an admin
            assert needed(broker, name, arguments) == role, name


def test_an_unreadable_schedule_needs_an_admin(broker: Broker) -> None:
    for change in (Change("s", 0, body=b"odd"), Change("s", 0, body=b"")):
        assert needed(broker, "change_schedules", {"changes": [change]}) == Role.ADMIN
    (made,) = MemoryBroker.change_schedules(broker, [Change("s", 0, body=b"odd")])  # type: ignore[arg-type]
    gone = Change("s", made.version, gone=True)
    assert needed(broker, "change_schedules", {"changes": [gone]}) == Role.ADMIN
    late = Change("s", made.version + 1, gone=True)  # nothing would be changed
    assert needed(broker, "change_schedules", {"changes": [late]}) == Role.OPERATOR


@pytest.mark.parametrize("name", ["detach", "release"])
def test_owners_of_the_stores_own_machine_are_given_up_by_an_admin(
    broker: Broker, name: str
) -> None:
    here = Owner(id=new_id(), kind="worker", name="here")
    elsewhere = Owner(id=new_id(), kind="worker", name="elsewhere", lease=30.0)
    for owner in (here, elsewhere):
        broker.attach(owner)
    assert needed(broker, name, {"owner_id": here.id}) == Role.ADMIN
    assert needed(broker, name, {"owner_id": elsewhere.id}) == Role.OPERATOR
    assert needed(broker, name, {"owner_id": "unknown"}) == Role.OPERATOR


def test_a_purge_needs_an_admin(broker: Noting) -> None:
    assert needed(broker, "cancel", {"job_ids": ["a"], "purge": "p"}) == Role.ADMIN
    assert needed(broker, "cancel", {"job_ids": ["a"], "purge": ""}) == Role.OPERATOR
