"""Deploy notes: the first worker with a new release keeps a note of the release in the history."""

from __future__ import annotations

import logging
import socket

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HistoryRow
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.errors import TidemillError

log = logging.getLogger("tidemill.worker")


def note_release(broker: Store, release: str, worker: str) -> None:
    """Keep a note of kind ``deploy``, if the release has none yet.

    Two workers that start at the same time may both keep a note. Then the earlier note counts.
    """
    if not release or Feature.HISTORY not in broker.features:
        return
    history = with_history(broker, "a release")
    try:
        if history.history("deploy", ALWAYS, name=release):
            return
        note = {"worker": worker, "host": socket.gethostname(), "time": clock.wall()}
        sample = msgspec.msgpack.encode(note)
        row = HistoryRow("deploy", release, ALWAYS, int(clock.wall()), (), sample)
        history.keep_history([row])
    except (TidemillError, OSError) as error:
        log.warning("the release %s is not noted: %s", release, error)
    else:
        log.info("the release %s is new to this store", release)
