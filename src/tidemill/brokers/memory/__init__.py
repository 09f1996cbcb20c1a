"""``memory://``: the executable specification. Dicts, one lock, no cleverness.

All jobs live and die with the process. The conformance suite and a state machine compare every
other broker with this one, call by call; where two brokers differ, one is wrong. The files have the
same names as those of the other brokers, so that you can read them side by side.

Read ``broker`` for the calls, ``transitions`` for the states of a job, and then one file for each
act: ``put``, ``claim``, ``settle``, ``due``.
"""

from tidemill.brokers.memory.broker import MemoryBroker, open_url
from tidemill.brokers.memory.settings import check_url

__all__ = ["MemoryBroker", "check_url", "open_url"]
