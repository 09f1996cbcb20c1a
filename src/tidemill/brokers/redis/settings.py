"""The settings in a ``redis://`` URL: the server, the store on it, and times."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

import msgspec

from tidemill.brokers.contract.retention import Retention, number_option
from tidemill.brokers.network.address import host_and_port, mask_password
from tidemill.core.config import Url, check_known
from tidemill.errors import InvalidOption

PORT, SENTINEL_PORT = 6379, 26379
_OPTIONS = (
    *("keep", "keep_count", "keep_failed", "owner_lease", "patience", "prefix", "replicas"),
    *("tls_ca", "tls_cert", "tls_key", "tls_verify", "sentinel_user", "sentinel_password"),
)
_SENTINEL = ("redis+sentinel", "rediss+sentinel")
_TLS = frozenset({"tls_ca", "tls_cert", "tls_key", "tls_verify"})
_PREFIX = re.compile(r"[\w.:-]{1,100}")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server, the nodes of a cluster, or the sentinels that know the address of ``service``."""

    hosts: tuple[tuple[str, int], ...]
    db: int = 0
    user: str = ""
    password: str = ""
    service: str = ""
    sentinel_user: str = ""
    sentinel_password: str = ""
    tls: dict[str, Any] | None = None
    shown: str = ""  # the URL without its passwords

    @property
    def where(self) -> str:
        """The address as text for a message."""
        places = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"sentinels {places}" if self.service else places


def parse_address(url: Url) -> Address:
    """Read ``redis://user:password@host:port/db``; several hosts are the nodes of a cluster."""
    # ``redis+sentinel://user:password@host,host/service/db`` asks sentinels. ``rediss://`` and
    # ``rediss+sentinel://`` use TLS, and so does any URL with a TLS option.
    scheme = url.scheme
    check_known(f"a {scheme}:// url", url.options, _OPTIONS)
    rest = url.text.split("://", 1)[1].partition("?")[0]
    login, _, place = rest.rpartition("@")
    user, _, password = login.partition(":")
    places, _, path = place.partition("/")
    sentinel = scheme in _SENTINEL
    service, db = _path(url, path, sentinel)
    default = SENTINEL_PORT if sentinel else PORT
    shown = _masked(url.text)
    hosts = tuple(host_and_port(one, default, shown) for one in (places or "localhost").split(","))
    options = url.options
    return Address(
        hosts=hosts,
        db=db,
        user=urllib.parse.unquote(user),
        password=urllib.parse.unquote(password),
        service=service,
        sentinel_user=options.get("sentinel_user", ""),
        sentinel_password=options.get("sentinel_password", ""),
        tls=_tls(options) if scheme.startswith("rediss") or _TLS & options.keys() else None,
        shown=shown,
    )


def prefix_of(url: Url) -> str:
    """The prefix of all keys: a hash tag, which keeps all keys on one node of a cluster."""
    prefix = url.options.get("prefix", "tidemill")
    if not _PREFIX.fullmatch(prefix):
        raise InvalidOption(
            f"prefix in the url must be 1 to 100 letters, digits or . : - _, not {prefix!r}"
        )
    return prefix


def _path(url: Url, path: str, sentinel: bool) -> tuple[str, int]:
    """Read (service, database) from the path of a URL."""
    parts = [urllib.parse.unquote(part) for part in path.split("/")] if path else []
    service = parts.pop(0) if sentinel and parts else ""
    if sentinel and not service:
        raise InvalidOption(
            f"url {_masked(url.text)!r} names no service; "
            "write redis+sentinel://host1,host2,host3/mymaster"
        )
    number = parts.pop(0) if parts else ""
    if parts or not (number or "0").isdigit():
        raise InvalidOption(
            f"url {_masked(url.text)!r} ends in no database number; write redis://host:6379/0"
        )
    return service, int(number or 0)


def _tls(options: Mapping[str, str]) -> dict[str, Any]:
    """The TLS options of redis-py's connection."""
    # Without ``tls_ca`` the system's certificate authorities are trusted. The checks are set
    # explicitly, because redis-py before version 6 checks no host names by default.
    tls: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    for option, name in (
        ("tls_ca", "ssl_ca_certs"),
        ("tls_cert", "ssl_certfile"),
        ("tls_key", "ssl_keyfile"),
    ):
        if option in options:
            tls[name] = options[option]
    verify = options.get("tls_verify", "yes")
    if verify not in ("yes", "no"):
        raise InvalidOption(f"tls_verify in the url must be yes or no, not {verify!r}")
    if verify == "no":
        tls |= {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    return tls


def _masked(text: str) -> str:
    return mask_password(re.sub(r"(sentinel_password=)[^&]*", r"\1***", text))


class Settings(msgspec.Struct, frozen=True):
    address: Address
    prefix: str
    retention: Retention
    patience: float
    owner_lease: float
    replicas: int


def check_url(url: Url) -> Settings:
    """Read a ``redis://`` or ``redis+sentinel://`` URL, or one of these with TLS."""
    lease = number_option(url.options, "owner_lease", 30.0)
    if not 1 <= lease <= 86400:
        raise InvalidOption(f"owner_lease in the url must be 1 to 86400 seconds, not {lease:g}")
    return Settings(
        parse_address(url),
        prefix_of(url),
        Retention.from_options(url.options),
        number_option(url.options, "patience", 10.0),
        lease,
        _replicas(url.options.get("replicas", "0")),
    )


def _replicas(text: str) -> int:
    """The number of replicas that must have a job before the job counts as accepted."""
    if not re.fullmatch(r"\d{1,2}", text):
        raise InvalidOption(f"replicas in the url must be a number from 0 to 99, not {text!r}")
    return int(text)
