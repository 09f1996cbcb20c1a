"""The calls that change jobs and queues, which a carrying broker passes on to its store."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.brokers.carrier.lending import LendingStore
from tidemill.brokers.contract.admin import KeptPurge
from tidemill.core.owner import Command


class AdminCalls:
    """Passes calls on to the store."""

    store: LendingStore

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        return self.store.cancel(job_ids, terminate=terminate)

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        return self.store.kick(job_ids, force=force)

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self.store.delete(job_ids)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        return self.store.alter(job_ids, rank=rank, queue=queue)

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self.store.set_queue(queue, paused=paused, max_size=max_size)

    def purge(self, queue: str) -> int:
        return self.store.purge(queue)

    def purge_kept(self, queue: str, purge_id: str) -> KeptPurge:
        return self.store.purge_kept(queue, purge_id)

    def restore(self, job_ids: Iterable[str], purge_id: str) -> list[bool]:
        return self.store.restore(job_ids, purge_id)

    def forget_queue(self, queue: str) -> bool:
        return self.store.forget_queue(queue)

    def command(self, owner_id: str, command: Command) -> bool:
        return self.store.command(owner_id, command)

    def backup(self, target: str) -> None:
        self.store.backup(target)
