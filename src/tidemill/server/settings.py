"""The settings of a server, from its command line."""

from __future__ import annotations

import ipaddress

import msgspec

from tidemill.errors import InvalidOption
from tidemill.server.tokens import Role

DEFAULT_PORT = 8333

MAX_REQUEST = 16 * 1024 * 1024

MAX_MEMORY = 256 * 1024 * 1024


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one server: ``tidemill server --help`` says what each option does.

    Durations are seconds, sizes are bytes. An empty text means none.

    Attributes:
        tls_role: the role of clients with a certificate if there are no tokens; empty: operator.
        burst: requests that a client may send at once.
        keep_alive: the time after which an idle connection is closed.
        access_log: log one line for each request, with ``log_json`` as JSON, with ``log_steps``
            also for each step of a remote worker.
        app: the served app as ``MODULE:VAR``, for commands that the dashboard shows.
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
    body_timeout: float = 60.0
    keep_alive: float = 75.0
    longest_poll: float = 300.0
    shutdown_timeout: float = 30.0
    access_log: bool = True
    log_json: bool = False
    log_steps: bool = False
    public_metrics: bool = False
    dashboard: bool = True
    see_arguments: str = "viewer"
    app: str = ""
    beanstalk: str = ""
    beanstalk_tasks: bool = False
    beanstalk_trust: bool = False
    beanstalk_max_job: int = 65535

    @property
    def open(self) -> bool:
        """Whether every client that reaches the server may do everything."""
        return not self.auth and not self.tls_ca


def check(settings: Settings) -> Settings:
    """Refuse settings that are unsafe or contradict each other; the error names the remedy."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise InvalidOption("--tls-cert and --tls-key go together; give both")
    if settings.max_memory < settings.max_request:
        raise InvalidOption(
            f"--max-memory {settings.max_memory:,} is less than --max-request "
            f"{settings.max_request:,}: the server could never serve a request of that size"
        )
    if settings.tls_ca and not settings.tls_cert:
        raise InvalidOption("--tls-ca requires certificates of clients; give --tls-cert with it")
    if settings.tls_role and (settings.auth or not settings.tls_ca):
        raise InvalidOption(
            "--tls-role is the role of clients with a certificate and no token: give --tls-ca "
            "with it, and no --auth, since each token has a role of its own"
        )
    if settings.tls_role and settings.tls_role.upper() not in Role.__members__:
        raise InvalidOption(
            f"--tls-role must be viewer, operator or admin, not {settings.tls_role!r}"
        )
    if settings.open and not is_loopback(settings.host):
        raise InvalidOption(
            f"other machines can reach {settings.host}, and any client there could do "
            "everything: give --auth FILE with tokens (tidemill token create), or --tls-ca, "
            "or listen on 127.0.0.1"
        )
    return settings


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
