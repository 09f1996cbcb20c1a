"""Settings of RabbitMQ's operators: rights of users, and policies that could destroy jobs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner
from harness import eventually
from rabbitmq_desk import LiveOwner, ids_of, job, message
from servers import RabbitMQ, free_port

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.brokers.rabbitmq.layout import Names
from tidemill.brokers.rabbitmq.policies import of_policies
from tidemill.cli import main
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Record, State
from tidemill.errors import BrokerUnavailable

Open = Callable[..., RabbitBroker]

FAILED = Filter(states=frozenset({State.FAILED}))


class Managed(RabbitMQ):
    """A RabbitMQ with the management plugin, at ``management``."""

    plugins = ("rabbitmq_management",)

    def __init__(self) -> None:
        port = free_port()
        self.management = f"http://127.0.0.1:{port}"
        super().__init__(
            "management.tcp.ip = 127.0.0.1",
            f"management.tcp.port = {port}",
            "collect_statistics_interval = 500",
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Managed]:
    server = Managed()
    often = "application:set_env(rabbit, quorum_tick_interval, 300)"
    server.eval(often)  # so often queues tell the plugin their policies
    yield server
    server.close()


@pytest.fixture
def url(server: Managed) -> str:
    return server.url


def user(server: RabbitMQ, name: str, write: str, prefix: str) -> str:
    """Add a user whose rights are those of the docs but for ``write``; the user's url."""
    own = rf"^{prefix}\\."
    server.eval(
        f'ok = rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"secret">>, <<"me">>)',
        f'ok = rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"/">>,'
        f' <<"{own}">>, <<"{write}">>, <<"{own}">>, <<"me">>)',
    )
    return server.url.replace("guest:guest", f"{name}:secret")


def test_the_documented_rights_are_enough_for_all_that_can_be_done(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    # given
    url = user(server, f"u{prefix}", rf"^(amq\\.default$|{prefix}\\.)", prefix)
    broker = open_one(url)
    # when
    broker.put([job("a"), job("a", delay=0.05), message("m")])
    worker, consumer = LiveOwner(broker), LiveOwner(broker, "c", kind="consumer")
    (fails, again) = worker.await_all(2, queues=("a",))
    assert worker.settle(fails, Outcome.FAIL, error="no")
    assert worker.settle(again, Outcome.RETRY, delay=0.05)
    assert worker.settle(worker.await_all(1, queues=("a",))[0])
    assert consumer.settle(consumer.await_all(1, queues=("m",))[0])
    # then
    (failed,) = eventually(lambda: broker.find(FAILED).records, "what failed")
    assert broker.retry([failed.envelope.id]) == [True]
    assert {row.name for row in broker.stats()} == {"a", "m"}
    assert broker.info()["failed"] == 0
    assert broker.policies().dangers == []
    assert broker.purge("a") == 1


def test_a_missing_right_is_reported_with_the_command_that_grants_it(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    url = user(server, f"u{prefix}", rf"^{prefix}\\.", prefix)
    with pytest.raises(BrokerUnavailable, match=r"amq\.default") as caught:
        open_one(url).put([job()])
    said = str(caught.value)
    assert f"rabbitmqctl set_permissions -p / u{prefix} '^{prefix}\\.' " in said
    assert f"'^(amq\\.default$|{prefix}\\.)'" in said


# -- policies ------------------------------------------------------------------------------------


def policy(server: RabbitMQ, prefix: str, **says: Any) -> None:
    """Set a policy for the places of jobs under a prefix."""
    names = ", ".join(
        f'{{<<"{key.replace("_", "-")}">>, {_erlang(value)}}}' for key, value in says.items()
    )
    server.eval(
        f'ok = rabbit_policy:set(<<"/">>, <<"{prefix}">>, <<"^{prefix}\\\\.(tasks|messages)">>,'
        f' [{names}], 0, <<"queues">>, <<"me">>)'
    )


def _erlang(value: object) -> str:
    return f'<<"{value}">>' if isinstance(value, str) else str(value)


def failed(broker: RabbitBroker, count: int) -> list[Record]:
    """The failed jobs, as soon as there are so many."""

    def enough() -> list[Record] | None:
        found = broker.find(FAILED).records
        return found if len(found) == count else None

    return eventually(enough, f"{count} failed")


def put_refused(broker: RabbitBroker, given: Envelope) -> str:
    """Why the broker refuses a job; empty when it takes the job."""
    try:
        broker.put([given])
    except BrokerUnavailable as error:
        return str(error)
    return ""


@pytest.mark.parametrize("queues", ["quorum", "classic"])
def test_a_full_queue_refuses_jobs_and_drops_none(
    server: RabbitMQ, open_one: Open, prefix: str, queues: str
) -> None:
    # law 1
    accepted, refused = [job()], ""
    open_one(patience=60, queues=queues).put(accepted)  # a busy server takes long to make the queue
    broker = open_one(patience=8, queues=queues)
    policy(server, prefix, max_length=3)
    while not refused and len(accepted) < 20:
        given = job()
        refused = put_refused(broker, given)
        accepted += [] if refused else [given]
    assert "refused a message (it is full" in refused
    assert len(accepted) >= 3
    worker = LiveOwner(open_one(queues=queues))
    leases = worker.await_all(len(accepted))
    assert [lease.open().id for lease in leases] == ids_of(accepted)
    assert all(map(worker.settle, leases))


def test_a_put_on_a_full_queue_waits_for_room(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    producer, worker = open_one(patience=60), LiveOwner(open_one())
    policy(server, prefix, max_length=2)
    jobs = [job() for _ in range(10)]
    thread = threading.Thread(target=lambda: [producer.put([one]) for one in jobs], daemon=True)
    thread.start()
    eventually(lambda: any(row.ready >= 2 for row in producer.stats()), "a full queue")
    leases = [lease for _ in jobs for lease in worker.await_all(1) if worker.settle(lease)]
    assert [lease.open().id for lease in leases] == ids_of(jobs)
    thread.join(30)
    assert not thread.is_alive()


def test_jobs_removed_by_a_delivery_limit_are_failed_and_may_be_retried(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    # given: jobs that go back more often than the policy allows
    broker = open_one()
    jobs = [job(), job()]
    broker.put(jobs)
    policy(server, prefix, delivery_limit=1)
    deadline = time.monotonic() + 60
    while broker.info()["failed"] < 2 and time.monotonic() < deadline:
        worker = LiveOwner(broker)
        worker.take(2)
        broker.detach(worker.id)
    # then
    records = failed(broker, 2)
    assert sorted(r.envelope.id for r in records) == sorted(ids_of(jobs))
    place = f"{prefix}.tasks.normal.default"
    for record in records:
        assert record.error == (
            f"rabbitmq took it out of {place}: the delivery-limit of a policy was reached"
        )
        assert abs(record.finished - time.time()) < 60
    server.eval(f'rabbit_policy:delete(<<"/">>, <<"{prefix}">>, <<"me">>)')
    assert broker.retry(ids_of(jobs)) == [True, True]
    worker = LiveOwner(broker)
    leases = worker.await_all(2)
    assert sorted(lease.open().id for lease in leases) == sorted(ids_of(jobs))
    assert all(map(worker.settle, leases))


def test_jobs_removed_by_a_message_ttl_are_failed(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    broker, given = open_one(), job("q")
    policy(server, prefix, message_ttl=100)
    broker.put([given])
    (record,) = failed(broker, 1)
    assert record.envelope.id == given.id
    assert record.error.endswith(f"{prefix}.tasks.normal.q: the message-ttl of a policy was over")


# -- policies ------------------------------------------------------------------------------------


def doctor(server: RabbitMQ, prefix: str, management: str) -> list[dict[str, str]]:
    """What the doctor finds of policies."""
    url = f"{server.url}?prefix={prefix}&management={management}"
    done = CliRunner().invoke(main, ["doctor", "--json", "--url", url])
    checks = json.loads(done.stdout)["checks"]
    return [check for check in checks if check["check"] == "policies"]


def told(server: Managed, prefix: str, said: str) -> dict[str, str]:
    """What the doctor finds, as soon as it says so of policies."""

    def found() -> dict[str, str] | None:
        (one,) = doctor(server, prefix, server.management)
        return one if said in one["message"] else None

    return eventually(found, said)


def test_the_doctor_names_policies_that_can_destroy_jobs(
    server: Managed, open_one: Open, prefix: str
) -> None:
    open_one().put([job("new")])
    policy(server, prefix, expires=10**9)
    said = f"policy '{prefix}' with expires deletes an unused queue with all that is in it: "
    assert told(server, prefix, said)["status"] == "warn"
    # and a policy that is safe for queues of jobs is no danger
    policy(server, prefix, delivery_limit=5)
    mended = told(server, prefix, f"none is known to destroy jobs; read from {server.management}")
    assert mended["status"] == "ok"


@pytest.mark.parametrize(
    ("name", "says", "harm"),
    [
        ("tasks.high.q", {"max-length": 1, "message-ttl": 1, "delivery-limit": 1}, []),
        ("tasks.high.q", {"expires": 1}, ["expires deletes an unused queue"]),
        ("failed", {"max-length": 10**6, "message-ttl": 10**12}, []),
        ("failed", {"max-length": 10}, ["max-length forgets failed jobs"]),
        ("failed", {"delivery-limit": 10}, ["delivery-limit forgets failed jobs"]),
        ("timer.3", {"message-ttl": 9}, ["message-ttl makes delayed jobs fail"]),
        ("timer.3", {"max-length": 9}, []),
    ],
)
def test_the_harm_of_each_policy_is_named(name: str, says: dict[str, Any], harm: list[str]) -> None:
    row = {"name": f"t.{name}", "effective_policy_definition": says}
    found = [danger.text for danger in of_policies([{**row, "policy": "p"}], Names("t", False))]
    assert len(found) == len(harm)
    for text, expected in zip(found, harm, strict=True):
        assert text.startswith(f"policy 'p' with {expected}")
        assert text.endswith(f": t.{name}")


def test_the_password_of_the_plugin_follows_no_redirect(
    server: RabbitMQ, prefix: str
) -> None:  # case M12, case S12
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Redirecting) as plugin:
        threading.Thread(target=plugin.serve_forever, args=(0.01,), daemon=True).start()
        (found,) = doctor(server, prefix, f"http://127.0.0.1:{plugin.server_port}")
        plugin.shutdown()
    assert "says: HTTP Error 302" in found["message"]
    assert len(asked) == 1


def test_without_the_plugin_the_doctor_says_that_policies_cannot_be_read(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    open_one().put([job()])
    (found,) = doctor(server, prefix, nowhere)
    assert (found["status"], found["message"].split("; ")[0]) == (
        "ok",
        "none is known to destroy jobs",
    )
    assert f"cannot be read: the management plugin at {nowhere} says: " in found["message"]
