"""Open the broker that a URL names. A driver is imported only when a URL names it.

Tracing and metrics attach here to every broker, too: :func:`instrument_calls`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tidemill.core.config import Url, parse_url
from tidemill.core.errors import FeatureMissing, InvalidOption
from tidemill.core.files import take_standard_descriptors

if TYPE_CHECKING:
    from tidemill.brokers.contract.features import Feature
    from tidemill.brokers.contract.store import Store

__all__ = [
    "DriverMissing",
    "check_url",
    "features_of",
    "instrument_calls",
    "instrumented",
    "migrate_store",
    "open_broker",
    "register_scheme",
]

_SCHEMES: dict[str, str | Callable[[Url], Store]] = {
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
}
_EXTRAS = {
    "hiredis": "redis",
    "httptools": "http",
    "pika": "rabbitmq",
    "psycopg": "postgres",
    "psycopg_pool": "postgres",
    "redis": "redis",
}


Instrument = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_instruments: list[Instrument] = []


class DriverMissing(FeatureMissing):
    """The driver of a broker is not installed; the message names the extra to install."""


def register_scheme(scheme: str, opener: str | Callable[[Url], Store]) -> None:
    """Teach ``open_broker`` a scheme: a function, or a module with a function ``open_url``.

    Such a module also has ``check_url``, which refuses a wrong URL without opening anything. It may
    have ``migrate_url`` if its stores need tables, ``grants_url`` if users of the server need
    rights, ``features_of`` if a URL determines the features, and ``read_url`` if reading a store
    differs from using it.
    """
    _SCHEMES[scheme] = opener


def open_broker(text: str, *, reading: bool = False) -> Store:
    """Open the broker that a URL names.

    With ``reading`` the caller only reads: no file is made, and no job is changed.

    Raises:
        InvalidOption: no broker has the scheme, or an option in the URL is wrong.
        DriverMissing: the driver is not installed.
        BrokerUnavailable: the store cannot be opened.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    take_standard_descriptors()
    if isinstance(opener, str):
        driver = _driver(url, opener)
        read = getattr(driver, "read_url", None) if reading else None
        opener = cast("Callable[[Url], Store]", read or driver.open_url)
    return instrumented(opener(url))


def instrument_calls(wrap: Instrument) -> Callable[[], None]:
    """Pass the calls of brokers opened from now on through ``wrap(name, call)``.

    ``wrap`` returns the function to call instead. Calls that a broker makes of itself pass through
    it, too. Brokers opened without instruments pay nothing. Returns a function that undoes this for
    brokers opened later.
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
    """Refuse a URL that could never be opened, as far as the text alone shows.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if isinstance(opener, str):
        _driver(url, opener).check_url(url)


def features_of(text: str) -> frozenset[Feature] | None:
    """The features of a URL's broker; None when only the open broker knows them.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if not isinstance(opener, str):
        return None
    find = getattr(_driver(url, opener), "features_of", None)
    return find(url) if find else None


def migrate_store(text: str) -> tuple[int, int] | None:
    """Create or upgrade the tables of a store; return the versions before and after.

    None when stores of this kind have no tables.

    Raises:
        InvalidOption, DriverMissing, BrokerUnavailable: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if not isinstance(opener, str):
        return None
    migrate = getattr(_driver(url, opener), "migrate_url", None)
    return migrate(url) if migrate else None


def grants_of(text: str, role: str) -> list[str] | None:
    """The SQL that lets a database role use a store; None when its server has no roles.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if not isinstance(opener, str):
        return None
    grants = getattr(_driver(url, opener), "grants_url", None)
    return grants(url, role) if grants else None


def _opener_of(url: Url) -> str | Callable[[Url], Store]:
    opener = _SCHEMES.get(url.scheme)
    if opener is None:
        raise InvalidOption(
            f"no broker for {url.scheme}:// in url {url.text!r}; known are "
            + ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        )
    return opener


def _driver(url: Url, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is None:
            raise
        raise DriverMissing(
            f"{url.scheme}:// needs {error.name}; install it: pip install 'tidemill[{extra}]'"
        ) from error
