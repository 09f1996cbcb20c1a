"""Waking others from a process that has no descriptor left, or that SIGPIPE may kill."""

from __future__ import annotations

import time

import pytest
from lmdb_desk import Process

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.owner import Owner

pytestmark = pytest.mark.everyday


def test_a_producer_out_of_descriptors_wakes_the_sleeping_worker(
    url: str, broker: LmdbBroker
) -> None:
    # given a worker that sleeps, and a producer that may open no more files
    broker.attach(Owner(id="o", name="w"))
    code = """
        import resource
        say("up")
        sys.stdin.readline()
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        broker.put([Envelope(id="a", task="t")])
        say("put")
    """
    with Process(url, code) as producer:
        producer.expect("up")
        broker.tick()
        assert not broker.exchange(Step("o", want=Want(1))).leases
        assert producer.popen.stdin is not None
        producer.popen.stdin.write("\n")
        producer.popen.stdin.flush()
        # when
        begun = time.monotonic()
        broker.wait("o", 25)
        # then
        assert time.monotonic() - begun < 15
        producer.expect("put")
    assert [lease.open().id for lease in broker.exchange(Step("o", want=Want(1))).leases] == ["a"]


def test_a_producer_with_sigpipe_at_its_default_survives_a_dead_sleeper(url: str) -> None:
    sleeper = """
        broker.attach(Owner(id="dead", name="w"))
        broker.exchange(Step("dead", want=Want(1)))
        say("asleep")
        sys.stdin.readline()
        take("dead")
        say("asleep again")
        time.sleep(60)
    """
    producer = """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        broker.put([Envelope(id="a", task="t")])
        say("known")
        sys.stdin.readline()
        broker.put([Envelope(id="b", task="t")])
        say("alive")
    """
    # given a producer that has the sleeper's FIFO open
    with Process(url, sleeper) as one, Process(url, producer) as two:
        one.expect("asleep")
        two.expect("known")
        for process, answer in ((one, "asleep again"), (two, "alive")):
            assert process.popen.stdin is not None
            process.popen.stdin.write("\n")
            process.popen.stdin.flush()
            process.expect(answer)
            if process is one:  # when it dies in its sleep
                one.kill()
