"""The session of a broker: its connections, its wake-ups, and the text of its calls."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidemill.brokers.postgres.connections import Connections, ServerConnection
from tidemill.brokers.postgres.encoding import texts
from tidemill.brokers.postgres.errors import Refused, Renumbered
from tidemill.brokers.postgres.schema import bring_up, check, installed
from tidemill.brokers.postgres.settings import Address
from tidemill.brokers.postgres.timed_connection import Connection
from tidemill.brokers.postgres.wakeup import WakeUps
from tidemill.core.clock import clock
from tidemill.core.locks import LongLock

_LOG = logging.getLogger("tidemill.postgres")
_COARSE = 1.0  # seconds between two looks where no notifications arrive
_CHORES = 0.5  # seconds between the chores of one process


class Statements:
    """The texts of calls with composite arguments, with the schema's name in them."""

    def __init__(self, schema: str) -> None:
        prefs = self.prefs(schema)
        batch = f'ROW(%b::text[], %b::bytea[], %b::bigint[]::int[], %s::jsonb)::"{schema}".batch'
        held = f"{batch}, %b::text[], %b::text[]"
        put = f'CALL "{schema}".put(%s::text, %s::bigint, {held}, {prefs}, %s::int, NULL)'
        self.put = put.encode()
        shape = (
            "ROW(%s::int, %s::bigint, %s::float8, %s::float8, %s::float8, %s::int, %b::float8[], "
            f'%b::bigint[]::int[])::"{schema}".shape'
        )
        self.put_single = (
            f'CALL "{schema}".put_single(%s::text, %s::bigint, %b::text, %b::bytea, {shape}, '
            f"{prefs}, %s::int, NULL)"
        ).encode()
        self.put_inside = f'SELECT "{schema}".put_inside({held}, {prefs})'.encode()
        settle = f'SELECT "{schema}".settle_inside(%s::int, %s::jsonb, {prefs})'
        self.settle_inside = settle.encode()
        changes = (
            "ROW(%b::text[], %b::bigint[], %b::float8[], %b::bytea[], %b::bigint[], %b::float8[], "
            f'%b::bytea[], %b::bigint[]::int[])::"{schema}".schedule_changes'
        )
        self.change_schedules = (
            f'CALL "{schema}".change_schedules(%s::text, %s::bigint, {changes}, {batch}, {prefs}, '
            "NULL)"
        ).encode()
        request = (
            "ROW(%s::int, %s::bigint, %b::bigint[], %b::float8[], %b::float8[], %b::bytea[], "
            "%s::jsonb, %b::bigint[], %b::float8[], %s::jsonb, %b::bigint[], %b::bigint[])"
            f'::"{schema}".step_request'
        )
        followers = batch.replace("%b", "%s")
        want = (
            "ROW(%s::int, %s::int[], %s::text, %s::bool, %s::bool, %s::bool, %s::bool, "
            f'%s::bool)::"{schema}".want'
        )
        exchange = (
            f'CALL "{schema}".exchange({request}, {followers}, {want}, {prefs}, %s::int, '
            "NULL, NULL, NULL"
        )
        self.exchange = f"{exchange})".encode()
        self.exchange_counting = f"{exchange}, %b::bytea)".encode()

    @staticmethod
    def prefs(schema: str) -> str:
        """The placeholder of :meth:`Session.prefs`."""
        return f'%s::"{schema}".prefs'


class Session:
    """The session of one broker with its server, in one process."""

    def __init__(self, address: Address, heard: Callable[[str], None], back: Callable[[], None]):
        self.address = address
        self.connections = Connections(address, self._look_for_queues)
        self.statements = Statements(address.schema)
        self.queues: dict[str, int] = {}  # queue numbers; replaced when the server has lost queues
        # Callers' connections that ``meet`` has checked.
        self._met: weakref.WeakSet[object] = weakref.WeakSet()
        self.wake_ups: WakeUps | None = None
        self._heard, self._back = heard, back
        self._lock = LongLock()
        self._tone_deaf = False
        self._settled = 0
        self._next_chores = 0.0
        self.unserved: Refused | None = None  # the store has another version now
        if address.migrate:
            bring_up(address)

        def look(_: object, conn: Connection) -> tuple[Any, ...]:
            found = check(conn, address.schema, address.where)
            row = conn.execute(
                "SELECT to_regclass(%s)::oid::bigint, "
                "extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8",
                [f"{address.schema}.owner"],
            ).fetchone()
            assert row is not None
            return found, *row

        try:
            self.installed, self._table, up = self.connections.run(look, patience=address.patience)
        except BaseException:
            self.connections.close()
            raise
        self._server_since = time.monotonic() - up

    # -- calls ----------------------------------------------------------------------------------

    def prefs(self) -> str:
        """The settings that calls pass, as the server's type ``prefs``."""
        keep = self.address.retention
        values = (
            *(clock.server_ahead(), keep.succeeded, keep.failed, keep.protect, keep.count),
            self.address.owner_lease,
        )
        return "(" + ",".join(map(repr, values)) + ")"

    def call(
        self,
        name: str,
        arguments: Sequence[Any],
        types: str,
        *,
        plain: bool = False,
        queues: Mapping[str, int] | None = None,
    ) -> Any:
        """Call a function; ``types`` are the types of its arguments, before the prefs."""
        # ``queues`` are the queue numbers in the arguments.
        holes = [f"%s::{kind.strip()}" for kind in types.split(",") if kind.strip()]
        values = list(arguments)
        if not plain:
            holes.append(self.statements.prefs(self.address.schema))
            values.append(self.prefs())
        text = f'SELECT "{self.address.schema}".{name}({", ".join(holes)})'

        def work(_: object, conn: Connection) -> Any:
            self.check_numbers(queues)
            row = conn.execute(text.encode(), values).fetchone()
            assert row is not None
            return row[0]

        return self.connections.run(work, patience=self.address.patience)

    def once(
        self,
        name: str,
        arguments: Sequence[Any],
        types: str,
        *,
        plain: bool = False,
        queues: Mapping[str, int] | None = None,
        brisk: bool = False,
    ) -> Any:
        """Call a function that changes something; repeat its answer when the reply was lost."""
        schema = self.address.schema
        holes = [f"%s::{kind.strip()}" for kind in types.split(",")]
        prefs = self.statements.prefs(schema)
        act = f'"{schema}".{name}({", ".join(holes if plain else [*holes, prefs])})'
        text = (
            f'WITH known AS MATERIALIZED (SELECT * FROM "{schema}".begin_call(%s, %s, {prefs})) '
            f'SELECT CASE WHEN fresh THEN "{schema}".end_call(%s, to_jsonb({act})) ELSE told END '
            "FROM known"
        )
        values = [*arguments] if plain else [*arguments, self.prefs()]
        serials: dict[str, int] = {}

        def work(connection: ServerConnection, conn: Connection) -> Any:
            self.check_numbers(queues)
            # If the serial exists, the reply was lost: repeat the call.
            if connection.id not in serials:
                connection.serial += 1
                serials[connection.id] = connection.serial
            begun = [connection.id, serials[connection.id], self.prefs(), connection.id]
            row = conn.execute(text.encode(), [*begun, *values]).fetchone()
            assert row is not None
            return row[0]

        return self.connections.run(work, patience=self._patience(brisk))

    def rows(self, name: str, arguments: Sequence[Any], types: str = "") -> list[tuple[Any, ...]]:
        """Return the rows of a function with many rows or several results."""
        holes = [f"%s::{kind.strip()}" for kind in types.split(",") if kind.strip()]
        holes.append(self.statements.prefs(self.address.schema))
        text = f'SELECT * FROM "{self.address.schema}".{name}({", ".join(holes)})'
        return self.query(text, [*arguments, self.prefs()])

    def query(
        self, text: str, arguments: Sequence[Any] | Mapping[str, Any] = (), *, brisk: bool = False
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a query that changes nothing."""

        def work(_: object, conn: Connection) -> list[tuple[Any, ...]]:
            return conn.execute(text.encode(), arguments).fetchall()

        return self.connections.run(work, patience=self._patience(brisk))

    def _patience(self, brisk: bool) -> float:
        """Seconds to wait for a server that is away."""
        return 0.0 if brisk else self.address.patience

    def known(self, names: Iterable[str]) -> dict[str, int]:
        """Make missing queues; return the queue numbers of these names, and maybe of others."""
        new = [name for name in names if name not in self.queues]
        if new:
            text = f'SELECT * FROM "{self.address.schema}".queue_numbers(%s)'
            found = dict(self.query(text, [texts(new)]))  # a new connection may replace ``queues``
            self.queues.update(found)
        return self.queues

    def _look_for_queues(self, conn: Connection) -> None:
        """Check whether the server of a new connection has lost queues, and renumber these."""
        # Queues get lost when a lagging standby takes over, or when a backup is restored.
        known = dict(self.queues)
        if not known:
            return
        names, schema = texts(list(known)), self.address.schema
        look = f'SELECT name, number FROM "{schema}".queue WHERE name = ANY (%s)'
        if dict(conn.execute(look.encode(), [names]).fetchall()) == known:
            return
        make = f'SELECT * FROM "{schema}".queue_numbers(%s)'
        found = dict(conn.execute(make.encode(), [names]).fetchall())
        if any(self.queues.get(name) != number for name, number in found.items()):
            self.queues = found

    def check_numbers(self, queues: Mapping[str, int] | None) -> None:
        """Check the queue numbers of a call's arguments before the call."""
        if queues is not None and queues is not self.queues:
            raise Renumbered(
                f"PostgreSQL at {self.address.where} has lost its latest steps, some of its queues "
                "among them; try again"
            )

    def meet(self, txn: object) -> None:
        """Check the known queue numbers before the first use of a caller's connection."""
        # The query uses a connection of the broker. If the server has failed, the broker connects
        # again, and a new connection checks the numbers (``_look_for_queues``).
        if txn not in self._met:
            self.query("SELECT 1")
            # The proxies of some pools do not support weak references.
            with contextlib.suppress(TypeError):
                self._met.add(txn)

    def outgrown(self) -> bool:
        """True when somebody has migrated the store since its opening."""
        self.look_for_upgrade()
        return self.unserved is not None

    def look_for_upgrade(self) -> None:
        """See whether somebody has migrated the store to another version."""

        def look(_: object, conn: Connection) -> Refused | None:
            if installed(conn, self.address.schema) is None:
                return None
            try:
                check(conn, self.address.schema, self.address.where)
            except Refused as error:
                return error
            return None

        self.unserved = self.connections.run(look)

    def chores(self, settled: int) -> int:
        """Return how many finished jobs the next call may prune; 0 until chores are due."""
        self._settled += settled
        now = time.monotonic()
        if now < self._next_chores:
            return 0
        self._next_chores = now + _CHORES
        count, self._settled = 2 * self._settled + 100, 0
        return count

    # -- wake-ups -------------------------------------------------------------------------------

    def listen(self) -> str:
        """Listen from now on; return the channel, or an empty text behind PgBouncer."""
        with self._lock:
            if self.wake_ups is None and not self._tone_deaf:
                address = self.address
                if self.connections.pooled and not address.direct:
                    self._tone_deaf = True
                    _LOG.warning(
                        "%s is behind a pooler, which ends sessions: no notification arrives. "
                        "Jobs start up to %g s late, and deaths are noticed after the "
                        "owner_lease of %g s; give the server's own url as direct=",
                        address.where, _COARSE, address.owner_lease,
                    )  # fmt: skip
                    return ""
                wake_ups = WakeUps(address, self._table, self._heard, self._back)
                wake_ups.start()
                self.wake_ups = wake_ups
            return self.wake_ups.channel if self.wake_ups else ""

    def longest_sleep(self) -> float:
        """Return the seconds that a thread may sleep if it relies on wake-ups."""
        wake_ups = self.wake_ups
        if wake_ups is None:
            return _COARSE
        return 3600.0 if wake_ups.since else 0.2

    def lasted(self) -> bool:
        """True when every living owner has had time to renew its lease at the server."""
        since = max(self._server_since, self.connections.silent_until)
        return bool(time.monotonic() - since >= self.address.owner_lease)

    def close(self) -> None:
        if self.wake_ups is not None:
            self.wake_ups.close()
        self.connections.close()

    def after_fork_child(self) -> None:
        if self.wake_ups is not None:
            self.wake_ups.after_fork_child()
        self.connections.after_fork_child()
