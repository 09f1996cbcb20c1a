"""The store's own time and wall time. Only this module reads times for jobs and leases.

The store's time is machine time plus an offset that changes only when the machine boots. The
store's time starts as wall time, and does not follow wall time afterwards: setting the clock moves
no delay and ends no lease (law 19). After a boot, the store's time continues from the last stored
reading, plus the wall time since this reading. The store's time never goes back.
"""

from __future__ import annotations

import lmdb
import msgspec

from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.clock import clock, id_time


class _Clock(msgspec.Struct, array_like=True):
    """The last stored readings of the clocks, in seconds."""

    boot: str
    offset: float
    wall: float
    machine: float
    born: float


class StoreTime:
    """The clocks of one store since the boot of this machine."""

    def __init__(self, store: Store) -> None:
        self._key = store.key("clock")
        self._boot = _boot_id()
        with store.reading_txn() as txn:
            noted = self._read(txn)
        if noted is None or noted.boot != self._boot:
            noted = self._after_boot(noted) if store.reading else store.write(self._note_boot)
        self._offset, self.born = noted.offset, noted.born

    def _read(self, txn: lmdb.Transaction[bytes]) -> _Clock | None:
        data = txn.get(self._key)
        return _CLOCK.decode(data) if data else None

    def _note_boot(self, txn: lmdb.Transaction[bytes]) -> _Clock:
        """The readings of this boot. The first process that opens the store stores it."""
        noted = self._read(txn)
        if noted is None or noted.boot != self._boot:
            noted = self._after_boot(noted)
            txn.put(self._key, _ENCODE(noted))
        return noted

    def _after_boot(self, last: _Clock | None) -> _Clock:
        """The readings of a new store, or of a store that was last used before the boot."""
        wall, machine = clock.wall(), clock.machine()
        if last is None:
            return _Clock(self._boot, wall - machine, wall, machine, wall)
        noted = last.machine + last.offset
        offset = noted + max(0.0, wall - last.wall) - machine
        return _Clock(self._boot, offset, wall, machine, last.born)

    def save(self, commit: Transitions) -> None:
        """Store the readings of the clocks, to continue from these after the next boot."""
        noted = _Clock(self._boot, self._offset, clock.wall(), clock.machine(), self.born)
        commit.txn.put(self._key, _ENCODE(noted))

    def micros(self) -> tuple[int, int]:
        """(store time, wall time) in microseconds."""
        return int((clock.machine() + self._offset) * MICRO), int(clock.wall() * MICRO)

    def on_wall(self, store_time: int) -> float:
        """A store time in microseconds as wall time, by the present difference of the clocks."""
        return store_time / MICRO - (clock.machine() + self._offset) + clock.wall()

    @property
    def identity(self) -> str:
        """The creation time of the store to the microsecond, which no other store shares."""
        return f"lmdb {self.born!r}"

    def was_here(self, job_id: str) -> bool:
        """True when tidemill made the id after the store was made."""
        made = id_time(job_id)
        return made is not None and self.born - 1 <= made <= clock.wall() + 1


def _boot_id() -> str:
    """The identity of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # macOS has no boot id; use the time of the boot
        return str(round(clock.wall() - clock.machine(), -2))


_ENCODE = msgspec.msgpack.Encoder().encode
_CLOCK = msgspec.msgpack.Decoder(_Clock)
