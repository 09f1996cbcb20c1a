"""``amqp://``: jobs on a RabbitMQ server (3.10 or later), for those who run one already.

Quorum queues, publisher confirms, delays held by the server. What the protocol cannot do (look into
a queue, take a job back, keep a result) is not claimed, and refused by name.
"""

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.rabbitmq.broker import RabbitBroker
from tidemill.brokers.rabbitmq.open import open_url, read_url
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.brokers.registry import features_of as store_features
from tidemill.core.config import Url

__all__ = ["RabbitBroker", "check_url", "features_of", "open_url", "read_url"]


def features_of(url: Url) -> frozenset[Feature] | None:
    """What the broker of a URL can do; with a store what that can, which it alone may know."""
    store = check_url(url).store
    return store_features(store) if store else RabbitBroker.features
