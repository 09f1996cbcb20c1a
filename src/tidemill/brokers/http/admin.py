"""Administration through the server: cancel, kick, delete and alter jobs; change queues."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.brokers.contract.admin import KeptPurge
from tidemill.brokers.http.server_calls import ServerCalls
from tidemill.core.owner import Command


class Admin(ServerCalls):
    """The calls of the contract that change jobs, queues and owners on request."""

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        done: list[bool] = self._call("cancel", job_ids=list(job_ids), terminate=terminate)
        return done

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        done: list[bool] = self._call("kick", job_ids=list(job_ids), force=force)
        return done

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        done: list[bool] = self._call("delete", job_ids=list(job_ids))
        return done

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        done: list[bool] = self._call("alter", job_ids=list(job_ids), rank=rank, queue=queue)
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._call("set_queue", queue=queue, paused=paused, max_size=max_size)

    def purge(self, queue: str) -> int:
        removed: int = self._call("purge", queue=queue)
        return removed

    def purge_kept(self, queue: str, purge_id: str) -> KeptPurge:
        kept: KeptPurge = self._call("purge_kept", queue=queue, purge_id=purge_id)
        return kept

    def restore(self, job_ids: Iterable[str], purge_id: str) -> list[bool]:
        done: list[bool] = self._call("restore", job_ids=list(job_ids), purge_id=purge_id)
        return done

    def forget_queue(self, queue: str) -> bool:
        forgotten: bool = self._call("forget_queue", queue=queue)
        return forgotten

    def command(self, owner_id: str, command: Command) -> bool:
        told: bool = self._call("command", owner_id=owner_id, command=command)
        return told

    def backup(self, target: str) -> None:
        self._call("backup", target=target)
