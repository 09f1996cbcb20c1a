"""Searches by arguments, in the eyes of people who may not see arguments."""

from __future__ import annotations

import threading

import pytest
from dashboard_desk import ANNA, Visitor, read, words

from tidemill import Tidemill
from tidemill.brokers.generic import audit
from tidemill.core.clock import new_id
from tidemill.dashboard import bulk
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.job_search import without_values
from tidemill.dashboard.roles import Role, User

SECRETS = "key:secret-1 args:secret-2"


@pytest.fixture
def dashboard(mill: Tidemill) -> Dashboard:
    return Dashboard(mill, see_arguments="admin")


@pytest.fixture
def anna(dashboard: Dashboard) -> Visitor:
    """An admin, who sees arguments."""
    return Visitor(dashboard, ANNA)


@pytest.fixture
def olga(dashboard: Dashboard) -> Visitor:
    """An operator, who does not."""
    return Visitor(dashboard, User("olga", Role.OPERATOR))


def ended_bulk(mill: Tidemill, query: str) -> str:
    """The id of an operation on all jobs that match, which has ended."""
    one = bulk.start(mill, bulk.Bulk(id=new_id(), action="delete", query=query, who="anna"))
    for thread in threading.enumerate():
        if thread.name == f"bulk-{one.id[-8:]}":
            thread.join(30)
    return one.id


def test_a_bulk_operation_hides_what_it_searched(
    mill: Tidemill, anna: Visitor, olga: Visitor
) -> None:
    bulk_id = ended_bulk(mill, f"queue:mail {SECRETS}")
    for path in ("/bulk", f"/bulk/{bulk_id}", "/audit"):
        assert "secret" not in olga.get(path), path
        hidden = "queue:mail key:hidden args:hidden"
        assert hidden in words(read(olga.last)), path
        assert f"queue:mail {SECRETS}" in words(anna.get(path)), path


def test_the_search_of_the_audit_list_does_not_find_what_is_hidden(
    mill: Tidemill, anna: Visitor, olga: Visitor
) -> None:
    ended_bulk(mill, f"queue:mail {SECRETS}")
    for what, count in (("queue:mail", 2), ("secret-1", 0)):
        assert olga.get(f"/audit?what={what}").count("data-row") == count
        assert anna.get(f"/audit?what={what}").count("data-row") == 2


def test_a_search_that_the_audit_list_cut_off_is_hidden(mill: Tidemill, olga: Visitor) -> None:
    audit.note(mill.broker, "anna", "started bulk retry", f'task:a key:"secret {"x" * 600}"')
    assert "secret" not in olga.get("/audit")
    assert "task:a key:hidden" in words(read(olga.last))


def test_the_reason_of_a_refused_retry_does_not_tell_the_key(mill: Tidemill, olga: Visitor) -> None:
    @mill.task(name="shop.pay")
    def pay() -> None: ...

    first = mill.enqueue(pay.call().using(key="secret-key"))
    first.cancel()
    mill.enqueue(pay.call().using(key="secret-key"))
    for path, form in ((f"/jobs/{first.id}/act", {}), ("/jobs/act", {"id": first.id})):
        said = olga.act(path, act="retry", back="/queues", **form)
        assert "another job has its key: an unfinished job" in said


def test_nobody_edits_arguments_without_seeing_them(mill: Tidemill) -> None:
    @mill.task(name="shop.pay")
    def pay(order: int) -> None: ...

    job = mill.enqueue(pay.call(7))
    dashboard = Dashboard(mill, see_arguments="admin", edit_jobs="operator")
    olga = Visitor(dashboard, User("olga", Role.OPERATOR))
    assert "needs the role admin" in olga.get(f"/jobs/{job.id}/edit", 403)
    assert "Edit and run again" not in olga.get(f"/jobs/{job.id}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("state:failed tag:a", "state:failed tag:a"),
        ('key:"a b",c state:ready', "key:hidden state:ready"),
        ('task:"a key:b" args:"x \\" y"', 'task:"a key:b" args:hidden'),
        ('task:a key:"cut of', "task:a key:hidden"),
        ('task:a queue:"cut of', "task:a queue:hidden"),
        ("word", "args:hidden"),
    ],
)
def test_values_that_tell_arguments_are_hidden(text: str, shown: str) -> None:
    assert without_values(text) == shown
