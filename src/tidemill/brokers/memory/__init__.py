"""``memory://``: the executable specification. Dicts, one lock, no cleverness.

Everything lives and dies with the process. Other brokers are compared with this one, move by move,
by the conformance suite and a state machine; where they differ, one of the two is wrong. Its rooms
have the names of the LMDB broker's, to be read side by side.
"""

from tidemill.brokers.memory.broker import MemoryBroker, open_url
from tidemill.brokers.memory.settings import check_url

__all__ = ["MemoryBroker", "check_url", "open_url"]
