"""How a server is to be, as its command line says."""

from __future__ import annotations

import ipaddress

import msgspec

from tidemill.errors import InvalidOption
from tidemill.server.tokens import Role

__all__ = ["DEFAULT_PORT", "Settings", "check", "is_loopback"]

DEFAULT_PORT = 8333

MAX_REQUEST = 16 * 1024 * 1024

MAX_MEMORY = 256 * 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are seconds, sizes bytes.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        auth: the file of tokens; empty when everybody who can reach it may do everything.
        tls_cert, tls_key: files in PEM; ``tls_ca`` signs the certificates that clients must show,
            and ``tls_role`` is the role of all who have one where there are no tokens, an operator
            when it is empty.
        allow_hosts: names that a request may give as Host besides those of this machine.
        max_request: bytes a request's body may have.
        max_memory: bytes that large bodies and answers may hold together.
        rate: requests a second of each token, or each address; 0 for no bound.
        burst: requests that may come at once.
        max_connections: open ones.
        header_timeout: in which a request's head must have come, on a new connection too.
        body_timeout: in which its body must have come; that an answer may wait to be taken.
        keep_alive: after which an idle connection is closed.
        longest_poll: that a long poll may take, whatever is asked for.
        shutdown_timeout: that requests in hand have to end.
        access_log: one line for each request; ``log_json`` writes them as JSON.
        beanstalk: where beanstalkd's protocol is served, HOST:PORT; empty for nowhere. With
            ``beanstalk_tasks`` bodies may be calls of tasks, ``beanstalk_trust`` says that all who
            reach that port may be trusted, ``beanstalk_max_job`` bytes a body may have.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    auth: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_role: str = ""
    allow_hosts: tuple[str, ...] = ()
    max_request: int = MAX_REQUEST
    max_memory: int = MAX_MEMORY
    rate: float = 0.0
    burst: float = 0.0
    max_connections: int = 10_000
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive: float = 75.0
    longest_poll: float = 300.0
    shutdown_timeout: float = 30.0
    access_log: bool = True
    log_json: bool = False
    beanstalk: str = ""
    beanstalk_tasks: bool = False
    beanstalk_trust: bool = False
    beanstalk_max_job: int = 65535

    @property
    def open(self) -> bool:
        """Everybody who reaches it may do everything."""
        return not self.auth and not self.tls_ca


def check(settings: Settings) -> Settings:
    """Refuse what would not be safe, or makes no sense.

    Raises:
        InvalidOption: the sentence says what to give with it.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise InvalidOption("--tls-cert and --tls-key go together; give both")
    if settings.max_memory < settings.max_request:
        raise InvalidOption(
            f"--max-memory {settings.max_memory:,} is less than --max-request "
            f"{settings.max_request:,}: a request of that size could never be served"
        )
    if settings.tls_ca and not settings.tls_cert:
        raise InvalidOption("--tls-ca asks for certificates of clients; give --tls-cert with it")
    if settings.tls_role and (settings.auth or not settings.tls_ca):
        raise InvalidOption(
            "--tls-role is for those who show a certificate and no token: give --tls-ca with it, "
            "and no --auth, where each token has a role of its own"
        )
    if settings.tls_role and settings.tls_role.upper() not in Role.__members__:
        raise InvalidOption(
            f"--tls-role must be viewer, operator or admin, not {settings.tls_role!r}"
        )
    if settings.open and not is_loopback(settings.host):
        raise InvalidOption(
            f"{settings.host} can be reached from other machines, and everybody there could do "
            "everything: give --auth FILE with tokens (tidemill token create), or --tls-ca, "
            "or listen on 127.0.0.1"
        )
    return settings


def is_loopback(host: str) -> bool:
    """True for an address, or a name, that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
