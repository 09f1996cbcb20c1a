"""``amqp://``: jobs on a RabbitMQ server (3.10 or later), for users who run a server already.

It uses quorum queues, publisher confirms and delays that the server holds. The protocol cannot look
into a queue, take a job back or keep a result. The broker refuses such calls by feature name.
"""

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.rabbitmq.broker import RabbitBroker
from tidemill.brokers.rabbitmq.open import open_url, read_url
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.brokers.registry import features_of as store_features
from tidemill.core.config import Url

__all__ = ["RabbitBroker", "check_url", "features_of", "open_url", "read_url"]


def features_of(url: Url) -> frozenset[Feature] | None:
    """The features of a URL's broker or of its ``store=``. None: only an open store knows them."""
    store = check_url(url).store
    return store_features(store) if store else RabbitBroker.features
