"""The settings in an ``amqp://`` or ``amqps://`` URL."""

from __future__ import annotations

import re
import ssl
import urllib.parse

import msgspec
import pika

from tidemill.brokers.contract.retention import number_option
from tidemill.brokers.network.address import host_and_port, mask_password
from tidemill.core.config import Url, check_known
from tidemill.errors import InvalidOption

PORT, TLS_PORT = 5672, 5671
CONNECT_TIMEOUT = 5.0  # seconds that one host has to answer

_OPTIONS = (
    *("management", "owner_lease", "patience", "prefix", "queues"),
    *("tls_ca", "tls_cert", "tls_key", "tls_verify"),
)
_PREFIX = re.compile(r"[\w:-]{1,20}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    hosts: tuple[tuple[str, int], ...]  # nodes of one cluster, tried in turn
    user: str
    password: str
    vhost: str
    tls: dict[str, str] | None
    prefix: str
    classic: bool  # durable classic queues with priorities, instead of quorum queues in bands
    # The seconds for which a put waits for the server to come back, or to accept messages again.
    patience: float
    owner_lease: float  # the seconds after which a silent worker counts as dead, by heartbeats
    shown: str  # the URL without its password
    # The address of the management plugin; empty for its port on the same hosts.
    management: str = ""

    @property
    def where(self) -> str:
        """The address as text for a message."""
        places = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return places + (f" (vhost {self.vhost})" if self.vhost != "/" else "")

    def parameters(self, heartbeat: int) -> list[pika.ConnectionParameters]:
        """Parameters for pika, one object for each host."""
        return [self._parameters(host, port, heartbeat) for host, port in self.hosts]

    def _parameters(self, host: str, port: int, heartbeat: int) -> pika.ConnectionParameters:
        silence = int(self.owner_lease * 1000)
        return pika.ConnectionParameters(
            host,
            port,
            self.vhost,
            pika.PlainCredentials(self.user, self.password),
            heartbeat=heartbeat,
            socket_timeout=CONNECT_TIMEOUT,
            stack_timeout=2 * CONNECT_TIMEOUT,
            ssl_options=None if self.tls is None else pika.SSLOptions(self.context(), host),
            client_properties={"connection_name": "tidemill"},
            # TCP_USER_TIMEOUT ends a connection whose data nobody has received for this time. It is
            # needed since a broken link sends no reset.
            tcp_options={"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": silence},
        )

    def context(self) -> ssl.SSLContext:
        tls = self.tls or {}
        files = " ".join(path for name, path in sorted(tls.items()) if name != "tls_verify")
        try:
            context = ssl.create_default_context(cafile=tls.get("tls_ca"))
            if tls.get("tls_verify", "yes") == "no":
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if "tls_cert" in tls:
                context.load_cert_chain(tls["tls_cert"], tls.get("tls_key"))
        except OSError as error:
            raise InvalidOption(
                f"the tls options of the url cannot be used ({files}): {error}"
            ) from None
        return context


def check_url(url: Url) -> Settings:
    """Read an ``amqp://user:password@host:port/vhost`` URL; several hosts are a cluster's nodes."""
    options = url.options
    check_known(f"an {url.scheme}:// url", options, _OPTIONS)
    rest = url.text.split("://", 1)[1].partition("?")[0]
    login, _, place = rest.rpartition("@")
    user, _, password = login.partition(":")
    places, slash, path = place.partition("/")
    secure = url.scheme == "amqps"
    default = TLS_PORT if secure else PORT
    shown = mask_password(url.text)
    lease = number_option(options, "owner_lease", 30.0)
    if not 2 <= lease <= 3600:
        raise InvalidOption(f"owner_lease in the url must be 2 to 3600 seconds, not {lease:g}")
    return Settings(
        hosts=tuple(
            host_and_port(one, default, shown) for one in (places or "localhost").split(",")
        ),
        user=urllib.parse.unquote(user) or "guest",
        password=urllib.parse.unquote(password) if login else "guest",
        vhost=urllib.parse.unquote(path) if slash and path else "/",
        tls=_tls(url) if secure else None,
        prefix=_prefix(options.get("prefix", "tidemill")),
        classic=_is_classic(options.get("queues", "quorum")),
        patience=number_option(options, "patience", 10.0),
        owner_lease=lease,
        shown=shown,
        management=_management(options.get("management", "")),
    )


def _prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text):
        raise InvalidOption(
            f"prefix in the url must be 1 to 20 letters, digits or : - _, not {text!r}"
        )
    return text


def _management(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^/?#@]+/?", text):
        raise InvalidOption(
            f"management in the url must be http://host:port or https://host:port, not {text!r}"
        )
    return text


def _is_classic(text: str) -> bool:
    if text not in ("quorum", "classic"):
        raise InvalidOption(f"queues in the url must be quorum or classic, not {text!r}")
    return text == "classic"


def _tls(url: Url) -> dict[str, str]:
    tls = {name: value for name, value in url.options.items() if name.startswith("tls_")}
    if tls.get("tls_verify", "yes") not in ("yes", "no"):
        raise InvalidOption(f"tls_verify in the url must be yes or no, not {tls['tls_verify']!r}")
    return tls
