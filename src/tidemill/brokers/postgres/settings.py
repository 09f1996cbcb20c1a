"""The settings of the broker, read once from the URL."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping

import msgspec

from tidemill.brokers.contract.retention import KEEP_OPTIONS, Retention, number_option
from tidemill.core.config import Url, check_known
from tidemill.errors import InvalidOption

_OURS = (*KEEP_OPTIONS, "direct", "migrate", "owner_lease", "patience", "pool", "schema")
_LIBPQ = (
    *("application_name", "channel_binding", "dbname", "gssencmode", "host", "hostaddr", "options"),
    *("passfile", "password", "port", "require_auth", "service", "sslcert", "sslcrl", "sslkey"),
    *("sslmode", "sslpassword", "sslrootcert", "target_session_attrs", "user"),
)
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_LEAST = 2.0  # seconds: the shortest time limit of an answer, and that of a new connection
OVER = 0.25  # seconds that a call waits after its limit, at which the server ends waits for locks
CANCEL = 0.5  # seconds that the server has to take a request to cancel

_SECRET = ("password", "sslpassword", "direct")


class Address(msgspec.Struct, frozen=True):
    """A ``postgresql://`` URL taken apart."""

    conninfo: str  # the URL as libpq takes it; with the password
    shown: str  # the URL without passwords
    where: str  # host, port and database, as errors name them
    direct: str  # the URL of the server itself, when ``conninfo`` leads to a pooler
    schema: str  # the schema that has the tables
    retention: Retention
    patience: float  # seconds that puts, queries and acts on jobs wait for a server that is away
    owner_lease: float  # seconds that a silent owner is kept
    pool: int  # the most connections, besides the listening connection
    migrate: bool  # migrate the tables when the broker opens

    @property
    def limit(self) -> float:
        """Seconds in which the server must answer, so that a call ends within ``patience``."""
        # The end of a call takes time, too. So a call may exceed a patience of less than 2.75 s.
        return max(_LEAST, self.patience - OVER - CANCEL)


def check_url(url: Url) -> Address:
    """Read a ``postgresql://`` URL."""
    options = url.options
    check_known("a postgresql:// url", options, (*_OURS, *_LIBPQ))
    schema = options.get("schema", "tidemill")
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise InvalidOption(
            f"schema in the url must be lower-case letters, digits and _, not {schema!r}"
        )
    owner_lease = number_option(options, "owner_lease", 30.0)
    if owner_lease < 1:
        raise InvalidOption(f"owner_lease in the url must be at least 1 second, not {owner_lease}")
    pool = number_option(options, "pool", 10)
    if pool < 2 or pool != int(pool):
        raise InvalidOption(f"pool in the url must be a whole number from 2, not {pool:g}")
    migrate = options.get("migrate", "0")
    if migrate not in ("0", "1"):
        raise InvalidOption(f"migrate in the url must be 0 or 1, not {migrate!r}")
    direct = options.get("direct", "")
    if direct and not direct.startswith(("postgresql://", "postgres://")):
        raise InvalidOption("direct in the url must be a postgresql:// url itself, %-encoded")
    return Address(
        conninfo=_conninfo(url),
        shown=masked(url.text),
        where=_where(url),
        direct=direct,
        schema=schema,
        retention=Retention.from_options(options),
        patience=number_option(options, "patience", 10.0),
        owner_lease=owner_lease,
        pool=int(pool),
        migrate=migrate == "1",
    )


def _conninfo(url: Url) -> str:
    base = url.text.partition("?")[0]
    rest = {name: value for name, value in url.options.items() if name in _LIBPQ}
    return f"{base}?{urllib.parse.urlencode(rest, quote_via=urllib.parse.quote)}" if rest else base


def masked(text: str) -> str:
    """Return a URL without its passwords, for logs, errors and people."""
    base, _, query = text.partition("?")
    scheme, _, rest = base.partition("://")
    credentials, at, host = rest.rpartition("@")
    user = credentials.partition(":")[0]
    shown = f"{scheme}://{user}{':***' if ':' in credentials else ''}{at}{host}"
    pairs = [pair.partition("=") for pair in query.split("&")] if query else []
    hidden = [f"{n}=***" if n in _SECRET and n != "direct" else f"{n}={v}" for n, _, v in pairs]
    hidden = [
        "direct=" + urllib.parse.quote(masked(urllib.parse.unquote(pair[7:])), safe="/:*@")
        if pair.startswith("direct=")
        else pair
        for pair in hidden
    ]
    return shown + ("?" + "&".join(hidden) if hidden else "")


def _where(url: Url) -> str:
    options: Mapping[str, str] = url.options
    rest = url.text.partition("://")[2].partition("?")[0].rpartition("@")[2]
    hosts, _, database = rest.partition("/")
    hosts = options.get("host", hosts) or "localhost"
    database = options.get("dbname", urllib.parse.unquote(database))
    return f"{hosts}, database {database}" if database else hosts
