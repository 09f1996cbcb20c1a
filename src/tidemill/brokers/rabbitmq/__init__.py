"""``amqp://``: jobs on a RabbitMQ server (3.10 or later), for users who run a server already.

The broker uses quorum queues, publisher confirms and delays that the server holds. AMQP cannot look
into a queue, take a job back or keep a result. The broker refuses calls that need this; the error
names the missing feature.
"""

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.rabbitmq.broker import RabbitBroker, open_url
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.core.config import Url

__all__ = ["RabbitBroker", "check_url", "features_of", "open_url"]


def features_of(url: Url) -> frozenset[Feature]:
    """The features of the broker, which are the same for each URL."""
    check_url(url)
    return RabbitBroker.features
