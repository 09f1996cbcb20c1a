"""The broker of a store behind a job server, for workers and producers on other machines."""

from tidemill.brokers.http.address import check_url
from tidemill.brokers.http.broker import HttpBroker, open_url

__all__ = ["HttpBroker", "check_url", "open_url"]
