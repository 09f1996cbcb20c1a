"""Redis elsewhere: behind TLS, in a cluster and behind sentinels."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, Place, check_counters, eventually, open_place
from servers import Redis, Sentinel, free_port, program

from tidemill import chain, group
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.errors import BrokerUnavailable

APP = """
@mill.task(retries=Retries(3, delay=0))
def brief(n): begin(); time.sleep(0.01); end(); return n

@mill.task(retries=Retries(3, delay=0))
def waits():
    begin()
    while not os.path.exists(f"{HERE}/go-{socket.gethostname()}"):
        time.sleep(0.01)
    note("end", os.getpid(), socket.gethostname())

"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p").mkdir()
    return tmp_path / "p"


def server(stack: contextlib.ExitStack, *options: str, durable: bool = False) -> Redis:
    return stack.enter_context(contextlib.closing(Redis(*options, durable=durable)))


def place_on(stack: contextlib.ExitStack, folder: Path, url: str) -> Place:
    place = stack.enter_context(open_place(folder, url))
    place.write(APP)
    return place


# -- TLS ------------------------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        [
            *(program("openssl", "openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
            *("-days", "2", "-keyout", key, "-out", cert, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def tls_options(folder: Path, port: int) -> list[str]:
    cert, key = certificate(folder)
    return [
        *("--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key),
        *("--tls-ca-cert-file", cert, "--tls-auth-clients", "no"),
    ]


def test_tls(stack: contextlib.ExitStack, folder: Path) -> None:
    port = free_port()
    server(stack, *tls_options(folder, port))
    cert = folder / "cert.pem"
    url = f"rediss://localhost:{port}/0"
    with pytest.raises(BrokerUnavailable, match="certificate"):
        open_broker(f"{url}?patience=0")
    place = place_on(stack, folder, f"{url}?tls_ca={cert}")
    worker = place.worker(slots=2).wait_ready()
    for n in range(3):  # the sleeper hears through it, too
        assert place.enqueue("brief", n).result(LIMIT) == n
        time.sleep(0.1)
    assert worker.stop() == 0
    with pytest.raises(BrokerUnavailable, match="certificate"):  # it is for localhost
        open_broker(f"rediss://127.0.0.1:{port}/0?tls_ca={cert}&patience=0")
    unchecked = open_broker(f"{url}?tls_verify=no")
    assert unchecked.info()["jobs"] == 3
    unchecked.close()


def test_sentinels_with_tls_and_the_authorities_of_the_system(
    stack: contextlib.ExitStack, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, sentinel_port = free_port(), free_port()
    options = tls_options(folder, port)
    master = server(stack, *options, "--tls-replication", "yes")
    options[1] = str(sentinel_port)
    stack.enter_context(
        contextlib.closing(
            Sentinel(port, options=[*options, "--tls-replication", "yes"], host="localhost")
        )
    )
    url = f"rediss+sentinel://localhost:{sentinel_port}/mymaster/0"
    with pytest.raises(BrokerUnavailable, match="certificate"):
        open_broker(url)
    # when
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
    broker = eventually(lambda: opened(url), "Sentinel knows the master")
    # then
    stack.callback(broker.close)
    broker.put([Envelope(id="a", task="t")])
    assert master.run("HLEN", "{tidemill}:job") == "1"


def opened(url: str) -> Any:
    with contextlib.suppress(BrokerUnavailable):
        return open_broker(url)


# -- a cluster ------------------------------------------------------------------------------------


def cluster(stack: contextlib.ExitStack, count: int) -> list[Redis]:
    nodes = [
        server(
            stack,
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
            *("--cluster-require-full-coverage", "no", "--cluster-port", str(free_port())),
            durable=True,
        )
        for _ in range(count)
    ]
    places = [f"127.0.0.1:{node.port}" for node in nodes]
    replicas = str(1 if count >= 6 else 0)
    nodes[0].run("--cluster", "create", *places, "--cluster-replicas", replicas, "--cluster-yes")
    eventually(
        lambda: all("cluster_state:ok" in node.run("CLUSTER", "INFO") for node in nodes),
        "the cluster is up",
    )
    return nodes


def test_a_cluster(stack: contextlib.ExitStack, folder: Path) -> None:
    # all keys of a store lie on one node, wherever the url leads first
    nodes = cluster(stack, 3)
    for number, node in enumerate(nodes):
        broker = open_broker(f"redis://127.0.0.1:{node.port}?prefix=shared")
        broker.put([Envelope(id=f"j{number}", task="t")])
        assert broker.stats()[0].ready == number + 1
        broker.close()
    place = place_on(stack, folder, f"redis://127.0.0.1:{nodes[0].port}?prefix=app&patience=20")
    worker = place.worker(processes=2, slots=2).wait_ready()
    jobs = list(place.enqueue_many("brief", [(n,) for n in range(200)]))
    whole = place.module.mill.enqueue(
        group(chain(place.module.brief.call(n), place.module.brief) for n in range(20))
    )
    # when the node that has it is killed and comes back
    slot = int(nodes[0].run("CLUSTER", "KEYSLOT", "{app}"))
    owner = next(node for node in nodes if holds(node, slot))
    time.sleep(0.3)
    owner.kill()
    time.sleep(0.5)
    owner.start()
    jobs.append(place.enqueue("brief", -1))
    for record in place.finish(jobs, 60):
        assert (record.state, record.losses) == (State.SUCCEEDED, 0)
    assert whole.result(timeout=60) == list(range(20))
    check_counters(place)
    assert worker.stop() == 0


def holds(node: Redis, slot: int) -> bool:
    line = next(line for line in node.run("CLUSTER", "NODES").splitlines() if "myself" in line)
    ranges = [part.split("-") for part in line.split()[8:] if not part.startswith("[")]
    return any(int(pair[0]) <= slot <= int(pair[-1]) for pair in ranges)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_cluster_whose_master_ends_for_good(
    stack: contextlib.ExitStack, folder: Path, how: str
) -> None:
    nodes = cluster(stack, 6)
    place = place_on(stack, folder, f"redis://127.0.0.1:{nodes[0].port}?prefix=app&patience=60")
    worker = place.worker(slots=4).wait_ready()
    assert place.enqueue("brief", 1).result(LIMIT) == 1
    slot = int(nodes[0].run("CLUSTER", "KEYSLOT", "{app}"))
    owner = next(node for node in nodes if holds(node, slot))
    owner.replicate()
    # when
    if how == "hangs":
        stack.enter_context(owner.stalled())
    else:
        owner.kill()
    # then: another node is asked, and knows who has it now
    began = time.monotonic()
    jobs = [place.enqueue("brief", n) for n in range(20)]
    assert time.monotonic() - began < 30
    assert [job.result(LIMIT) for job in jobs] == list(range(20))
    assert worker.stop() == 0


# -- sentinels ------------------------------------------------------------------------------------


def test_sentinels_and_a_failover(stack: contextlib.ExitStack, folder: Path) -> None:
    # law 1, as far as replication goes
    master = server(stack)
    replica = server(stack, "--replicaof", "127.0.0.1", str(master.port))
    sentinels = [sentinel(stack, master.port) for _ in range(3)]
    eventually(lambda: "master_link_status:up" in replica.run("INFO", "replication"), "it follows")
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in sentinels)
    for known in ("num-other-sentinels\n2", "num-slaves\n1"):
        eventually(lambda: known in sentinels[0].run("SENTINEL", "MASTER", "mymaster"))  # noqa: B023
    place = place_on(stack, folder, f"redis+sentinel://{hosts}/mymaster/0?patience=100")
    worker = place.worker(slots=4).wait_ready()
    held = place.enqueue("waits")
    place.wait_notes(f"begin {held.id}")
    waiting = place.enqueue("brief", 0, delay=1.0)
    master.replicate()
    # when
    master.kill()
    # then: what was replicated is there, leases and sleepers go on
    jobs = [place.enqueue("brief", n) for n in range(20)]
    assert [job.result(2 * LIMIT) for job in jobs] == list(range(20))
    assert waiting.result(LIMIT) == 0
    (folder / f"go-{socket.gethostname()}").touch()
    (record,) = place.finish([held])
    assert (record.state, record.attempt, record.losses) == (State.SUCCEEDED, 1, 0)
    # and the old master, back as a replica, is left alone
    master.start()
    assert place.enqueue("brief", 7).result(LIMIT) == 7
    assert worker.stop() == 0
    with pytest.raises(BrokerUnavailable, match="sentinels"):
        open_broker(f"redis+sentinel://{hosts}/unknown?patience=0")


def sentinel(stack: contextlib.ExitStack, master: int) -> Sentinel:
    return stack.enter_context(contextlib.closing(Sentinel(master, quorum=2)))
