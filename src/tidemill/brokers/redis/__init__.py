"""``redis://``: jobs on a Redis server (7 or later, or Valkey), for workers on many machines.

Every call of the contract is one Lua function. While a function runs, the server runs nothing else.
``lua/layout.lua`` lists the keys. The jobs are as durable as the server's append-only file.
"""

import redis

if int(redis.__version__.partition(".")[0]) < 5:
    raise ModuleNotFoundError(name="redis>=5")

from tidemill.brokers.redis.broker import RedisBroker, open_url
from tidemill.brokers.redis.settings import check_url

__all__ = ["RedisBroker", "check_url", "open_url"]
