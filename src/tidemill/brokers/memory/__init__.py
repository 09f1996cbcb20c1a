"""``memory://``: the executable specification. Dicts, one lock, no cleverness.

All jobs live and die with the process. The conformance suite and a state machine compare every
other broker with this one, call by call; where two brokers differ, one is wrong.

Read ``broker`` for the calls, and :mod:`tidemill.brokers.rules` for what they do to jobs.
"""

from tidemill.brokers.memory.broker import MemoryBroker, check_url, open_url

__all__ = ["MemoryBroker", "check_url", "open_url"]
