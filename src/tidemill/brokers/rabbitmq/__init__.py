"""``amqp://``: jobs on a RabbitMQ server (3.10 or later), for users who run a server already.

The broker uses quorum queues, publisher confirms and delays that the server holds. AMQP cannot look
into a queue, take a job back or keep a result. The broker refuses calls that need this; the error
names the missing feature.
"""

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.rabbitmq.broker import RabbitBroker
from tidemill.brokers.rabbitmq.open import open_url, read_url
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.brokers.registry import features_of as store_features
from tidemill.core.config import Url

__all__ = ["RabbitBroker", "check_url", "features_of", "open_url", "read_url"]


def features_of(url: Url) -> frozenset[Feature] | None:
    """The features of a URL's broker or ``store=``; None if only an open store knows them."""
    store = check_url(url).store
    return store_features(store) if store else RabbitBroker.features
