"""Which broker a URL names, and opening it. Drivers are imported only when one is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tidemill.config import Url, parse_url
from tidemill.errors import FeatureMissing, InvalidOption

if TYPE_CHECKING:
    from tidemill.brokers.base import Broker, Feature

__all__ = [
    "DriverMissing",
    "check_url",
    "features_of",
    "migrate_store",
    "open_broker",
    "register_scheme",
]

_SCHEMES: dict[str, str | Callable[[Url], Broker]] = {
    "memory": "tidemill.brokers.memory",
    "lmdb": "tidemill.brokers.lmdb",
    "redis": "tidemill.brokers.redis",
    "rediss": "tidemill.brokers.redis",
    "redis+sentinel": "tidemill.brokers.redis",
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


class DriverMissing(FeatureMissing):
    """The driver of a broker is not installed; the sentence names the extra to install."""


def register_scheme(scheme: str, opener: str | Callable[[Url], Broker]) -> None:
    """Teach ``open_broker`` a scheme: a function, or a module that has one named ``open_url``.

    A module has ``check_url`` besides, which refuses what can be seen without opening anything, and
    may have ``migrate_url`` if its stores are not made by themselves, and ``features_of`` if a URL
    says all that its broker can do.
    """
    _SCHEMES[scheme] = opener


def open_broker(text: str) -> Broker:
    """Open the broker a URL names. Drivers are imported only now.

    Raises:
        InvalidOption: no broker has the scheme, or an option in the URL is wrong.
        DriverMissing: the driver is not installed.
        BrokerUnavailable: the store cannot be opened.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if isinstance(opener, str):
        opener = cast("Callable[[Url], Broker]", _driver(url, opener).open_url)
    return opener(url)


def check_url(text: str) -> None:
    """Refuse a URL that could never be opened: what can be seen without opening it.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if isinstance(opener, str):
        _driver(url, opener).check_url(url)


def features_of(text: str) -> frozenset[Feature] | None:
    """What the broker of a URL can do; None when that is only known of one that is open.

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
    """Make the tables of a store, or bring them to this version: the versions before and after.

    None when stores of this kind need nothing of the sort.

    Raises:
        InvalidOption, DriverMissing, BrokerUnavailable: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if not isinstance(opener, str):
        return None
    migrate = getattr(_driver(url, opener), "migrate_url", None)
    return migrate(url) if migrate else None


def _opener_of(url: Url) -> str | Callable[[Url], Broker]:
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
