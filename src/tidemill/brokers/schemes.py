"""Which broker a URL names, and opening it. Drivers are imported only when one is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tidemill.config import Url, parse_url
from tidemill.errors import FeatureMissing, InvalidOption
from tidemill.files import take_standard_descriptors

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


class DriverMissing(FeatureMissing):
    """The driver of a broker is not installed; the sentence names the extra to install."""


def register_scheme(scheme: str, opener: str | Callable[[Url], Broker]) -> None:
    """Teach ``open_broker`` a scheme: a function, or a module that has one named ``open_url``.

    A module has ``check_url`` besides, which refuses what can be seen without opening anything. It
    may have ``migrate_url`` if its stores are not made by themselves, ``grants_url`` if users of
    the server need rights, ``features_of`` if a URL says all that its broker can do, and
    ``read_url`` if to look at a store differs from using it.
    """
    _SCHEMES[scheme] = opener


def open_broker(text: str, *, reading: bool = False) -> Broker:
    """Open the broker a URL names. Drivers are imported only now.

    With ``reading`` the caller only looks: no file is made, and no job is changed.

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
        opener = cast("Callable[[Url], Broker]", read or driver.open_url)
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


def grants_of(text: str, role: str) -> list[str] | None:
    """The SQL that lets a role of the server's use a store; None where a store has no roles.

    Raises:
        InvalidOption, DriverMissing: as ``open_broker``.
    """
    url = parse_url(text)
    opener = _opener_of(url)
    if not isinstance(opener, str):
        return None
    grants = getattr(_driver(url, opener), "grants_url", None)
    return grants(url, role) if grants else None


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
