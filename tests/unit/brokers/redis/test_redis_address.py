"""The TLS options in the URL of a Redis server."""

from __future__ import annotations

import pytest

from tidemill.brokers.redis.settings import parse_address
from tidemill.core.config import parse_url


@pytest.mark.parametrize(
    ("url", "ca"),
    [
        ("rediss://host", None),
        ("rediss+sentinel://host/mymaster", None),
        ("redis://host?tls_ca=ca.pem", "ca.pem"),
        ("redis+sentinel://host/mymaster?tls_ca=ca.pem", "ca.pem"),
    ],
)
def test_tls_checks_certificate_and_host_name(url: str, ca: str | None) -> None:
    # said aloud: before version 6 redis-py did not check host names unless asked to
    tls = parse_address(parse_url(url)).tls
    assert (tls["ssl_cert_reqs"], tls["ssl_check_hostname"]) == ("required", True)
    assert tls.get("ssl_ca_certs") == ca


@pytest.mark.parametrize("option", ["tls_verify=no", "tls_cert=c.pem", "tls_key=k.pem"])
def test_an_option_of_tls_is_never_passed_over(option: str) -> None:
    for url in (f"redis://host?{option}", f"redis+sentinel://host/mymaster?{option}"):
        assert parse_address(parse_url(url)).tls is not None


def test_without_tls_there_is_none() -> None:
    assert parse_address(parse_url("redis://host?patience=1")).tls is None
