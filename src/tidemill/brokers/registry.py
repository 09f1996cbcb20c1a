"""Open the broker that a URL names. A driver is imported only when a URL names it.

Tracing and metrics attach here to every broker, too: :func:`instrument_calls`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidemill.core.config import Url, parse_url
from tidemill.core.files import take_standard_descriptors
from tidemill.core.suggest import did_you_mean
from tidemill.errors import FeatureMissing, InvalidOption

if TYPE_CHECKING:
    from tidemill.brokers.contract.features import Feature
    from tidemill.brokers.contract.store import Store

# The package of a broker has ``open_url``, and ``check_url``, which refuses a wrong URL without
# opening anything. It may have ``migrate_url`` if its stores need tables, ``grants_url`` if users
# of the server need rights, ``features_of`` if a URL determines the features, and ``read_url`` if
# reading a store differs from using it.
_SCHEMES = {
    "memory": "tidemill.brokers.memory",
    "lmdb": "tidemill.brokers.lmdb",
    "redis": "tidemill.brokers.redis",
    "rediss": "tidemill.brokers.redis",
    "redis+sentinel": "tidemill.brokers.redis",
    "rediss+sentinel": "tidemill.brokers.redis",
    "postgresql": "tidemill.brokers.postgres",
    "amqp": "tidemill.brokers.rabbitmq",
    "amqps": "tidemill.brokers.rabbitmq",
    "http": "tidemill.brokers.http",
    "https": "tidemill.brokers.http",
    "django": "tidemill.brokers.django",
}
_EXTRAS = {
    "django": "django",
    "hiredis": "redis",
    "httptools": "http",
    "pika": "rabbitmq",
    "psycopg": "postgres",
    "psycopg_pool": "postgres",
    "redis": "redis",
    "redis>=5": "redis",
}

Instrument = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_instruments: list[Instrument] = []


class DriverMissing(FeatureMissing):
    """The driver of a broker is not installed; the message names the extra to install."""


def open_broker(text: str, *, reading: bool = False) -> Store:
    """Open the broker that a URL names.

    With ``reading`` the broker makes no file and changes no job.

    Raises:
        InvalidOption: no broker has the scheme, or an option in the URL is wrong.
        DriverMissing: the driver is not installed.
        BrokerUnavailable: the store cannot be opened.
    """
    url = parse_url(text)
    take_standard_descriptors()
    package = _package_of(url)
    read = getattr(package, "read_url", None) if reading else None
    return instrumented((read or package.open_url)(url))


def instrument_calls(wrap: Instrument) -> Callable[[], None]:
    """Pass the calls of brokers opened from now on through ``wrap(name, call)``.

    ``wrap`` returns the function to call instead. Calls that a broker makes to itself pass through
    ``wrap``, too. Without instruments, calls have no overhead. Returns a function that removes
    ``wrap`` for brokers opened later.
    """
    _instruments.append(wrap)
    return lambda: _instruments.remove(wrap)


def instrumented(broker: Store) -> Store:
    """The broker, with its calls passed through every instrument."""
    if _instruments:
        from tidemill.brokers.contract.rpc import CALLS

        for name in ("wake", "close", *CALLS):
            call = getattr(broker, name, None)
            if call is None:
                continue
            for wrap in _instruments:
                call = wrap(name, call)
            setattr(broker, name, call)
    return broker


def check_url(text: str) -> None:
    """Refuse a URL whose text alone shows that it can never be opened.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    _ask_package(text, "check_url")


def features_of(text: str) -> frozenset[Feature] | None:
    """The features of a URL's broker; None when only the open broker knows them.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    features: frozenset[Feature] | None = _ask_package(text, "features_of")
    return features


def migrate_store(text: str) -> tuple[int, int] | None:
    """Create or upgrade the tables of a store; return the versions before and after.

    None when stores of this kind have no tables.

    Raises:
        InvalidOption, DriverMissing, BrokerUnavailable: as ``open_broker``.
    """
    versions: tuple[int, int] | None = _ask_package(text, "migrate_url")
    return versions


def grants_of(text: str, role: str) -> list[str] | None:
    """The SQL that lets a database role use a store; None when its server has no roles.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    statements: list[str] | None = _ask_package(text, "grants_url", role)
    return statements


def _ask_package(text: str, name: str, *args: object) -> Any:
    """Call a function of the broker's package with the URL; None when it has no such function."""
    url = parse_url(text)
    function = getattr(_package_of(url), name, None)
    return function(url, *args) if function else None


def _package_of(url: Url) -> Any:
    if url.scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        near = did_you_mean(url.scheme, _SCHEMES) or f"known are {known}"
        raise InvalidOption(f"no broker for {url.scheme}:// in url {url.text!r}; {near}")
    try:
        return importlib.import_module(_SCHEMES[url.scheme])
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        raise DriverMissing(
            f"{url.scheme}:// needs {error.name}; install it: pip install 'tidemill[{extra}]'"
        ) from error
