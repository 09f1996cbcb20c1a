"""``amqps://``: which certificates are trusted, and the sentences about the others."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rabbitmq_desk import LiveOwner, job, open_rabbit
from servers import RabbitMQ, free_port, rabbitmq_url
from servers.base import program

from tidemill.brokers.rabbitmq.errors import sentence
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.core.config import parse_url
from tidemill.errors import BrokerUnavailable


class Authority:
    """One that signs certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign"),
            *("-keyout", self._key, "-out", self.ca),
        )

    def sign(self, name: str, alt: str = "") -> tuple[Path, Path]:
        """A certificate and its key; ``alt`` says for which hosts."""
        key, request, made = (self._folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", key, "-out", request),
        )
        more = self._folder / f"{name}.ext"
        more.write_text(f"subjectAltName={alt}\n" if alt else "")
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-days", "2"),
            *("-CAcreateserial", "-extfile", more, "-out", made),
        )
        return made, key


def openssl(*command: str | Path) -> None:
    subprocess.run(
        [program("openssl", "openssl"), *map(str, command)], check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "ca")


@pytest.fixture(scope="module")
def place(folder: Path, authority: Authority) -> Iterator[str]:
    """Host and port of a server that has a certificate for 127.0.0.1, and wants one from us."""
    cert, key = authority.sign("server", "IP:127.0.0.1")
    port = free_port()
    server = RabbitMQ(
        f"listeners.ssl.1 = 127.0.0.1:{port}",
        f"ssl_options.cacertfile = {authority.ca}",
        f"ssl_options.certfile = {cert}",
        f"ssl_options.keyfile = {key}",
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
    )
    yield f"127.0.0.1:{port}"
    server.close()


@pytest.fixture(scope="module")
def ours(authority: Authority) -> dict[str, Path]:
    cert, key = authority.sign("client")
    return {"tls_cert": cert, "tls_key": key}


def test_jobs_go_over_a_line_that_both_ends_trust(
    place: str, authority: Authority, ours: dict[str, Path]
) -> None:
    broker = open_rabbit(f"amqps://{place}/", "tls", tls_ca=authority.ca, **ours)
    try:
        given = job()
        broker.put([given])
        worker = LiveOwner(broker)
        [lease] = worker.await_all(1)
        assert lease.open().id == given.id
        assert worker.settle(lease)
        assert broker.stats()[0].ready == 0
    finally:
        broker.close()


def test_a_certificate_that_is_not_trusted_is_refused_at_once_in_one_sentence(
    place: str, folder: Path, authority: Authority, ours: dict[str, Path]
) -> None:
    other = Authority(folder, "other")
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        open_rabbit(f"amqps://{place}/", "tls", tls_ca=other.ca, patience=60, **ours)
    said = str(caught.value)
    assert said.startswith(f"rabbitmq at {place} has a certificate that is not trusted: ")
    assert said.endswith(" (tls_ca= in the url says who may sign it)")
    # and for another host, which it was not made for
    far = place.replace("127.0.0.1", "localhost")
    with pytest.raises(BrokerUnavailable, match=r"is not trusted: .*'localhost'"):
        open_rabbit(f"amqps://{far}/", "tls", tls_ca=authority.ca, patience=60, **ours)
    assert time.monotonic() - began < 50
    broker = open_rabbit(f"amqps://{place}/", "tls", tls_verify="no", **ours)
    broker.close()


def test_a_missing_client_certificate_is_reported(place: str, authority: Authority) -> None:
    said = f"rabbitmq at {place} .*wants a client certificate"
    with pytest.raises(BrokerUnavailable, match=said):
        open_rabbit(f"amqps://{place}/", "tls", tls_ca=authority.ca, patience=60)


def test_a_server_that_does_not_speak_tls_there_is_named() -> None:
    plain = rabbitmq_url().partition("@")[2].partition("/")[0]
    with pytest.raises(BrokerUnavailable, match=f"rabbitmq at {plain} does not speak TLS there"):
        open_rabbit(f"amqps://{plain}/", "tls", patience=60)


def test_a_server_that_hangs_up_without_a_reason_may_want_a_certificate(place: str) -> None:
    error = ssl.SSLEOFError(8, "EOF occurred in violation of protocol (_ssl.c:2427)")
    url = parse_url(f"amqps://{place}/")
    assert sentence(error, check_url(url)) == (
        f"rabbitmq at {place} closed the connection; perhaps it wants a client certificate "
        "(tls_cert= and tls_key= in the url)"
    )
