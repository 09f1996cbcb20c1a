"""Open an ``amqp://`` URL, to use its jobs or only to read them."""

from __future__ import annotations

from tidemill.brokers.carrier.broker import CarryingBroker
from tidemill.brokers.carrier.lending import lending_store
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.rabbitmq.broker import RabbitBroker
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.brokers.registry import open_broker
from tidemill.core.config import Url


def open_url(url: Url) -> Broker:
    """The broker of a URL. With ``store=`` it carries the ready jobs of that store."""
    return _open(url, reading=False)


def read_url(url: Url) -> Broker:
    """The broker of a URL for reading. The store's own broker opens the store for reading."""
    return _open(url, reading=True)


def _open(url: Url, *, reading: bool) -> Broker:
    settings = check_url(url)
    if not settings.store:
        return RabbitBroker(settings)
    store = lending_store(open_broker(settings.store, reading=reading))
    try:
        return CarryingBroker(store, RabbitBroker(settings.for_store(store.identity)))
    except BaseException:
        store.close()
        raise
