"""Deploy notes: the first worker with a new release keeps a note of the release."""

from __future__ import annotations

import logging

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.client.history import Deploy
from tidemill.core.clock import clock
from tidemill.core.errors import TidemillError

log = logging.getLogger("tidemill.worker")

KEPT = 90 * 86_400.0
"""Seconds for which a note is kept, as rows of history by the hour."""


def note_release(broker: Store, release: str) -> None:
    """Keep a note of the release, if the release has none yet."""
    if not release or Feature.HISTORY not in broker.features:
        return
    notes = Notes(broker, "deploy", "a release")
    try:
        if notes.get(release):
            return
        note = Deploy(release, int(clock.wall()))
        notes.put(release, msgspec.msgpack.encode(note), seconds=KEPT)
    except (TidemillError, OSError) as error:
        log.warning("the release %s is not noted: %s", release, error)
    else:
        log.info("the release %s is new to this store", release)
