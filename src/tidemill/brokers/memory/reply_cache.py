"""The reply cache: the last reply to each remote owner, and the answers to puts by nonce."""

from __future__ import annotations

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step, late
from tidemill.brokers.rules.transitions import Jobs
from tidemill.brokers.shared.remote_owners import SignOfLife
from tidemill.core.job import Owner, Put

_KEEP = 600.0  # seconds


class _LastReply:
    """The last step of an owner, and its reply."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.reply = Reply()
        self.signs = 0


class ReplyCache:
    """Replies by serial, and answers to puts by nonce."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._replies: dict[str, _LastReply] = {}
        self._puts: dict[str, tuple[float, list[Put]]] = {}  # nonce -> expiry, answer

    def attached(self, owner: Owner) -> None:
        """Record that an owner attached, perhaps again: a sign of life."""
        last = self._replies.setdefault(owner.id, _LastReply(0))
        last.signs += 1
        if owner.serial > last.serial:
            last.serial, last.reply = owner.serial, Reply()

    def known(self, owner: Owner, step: Step) -> Reply | None:
        """The reply to a repeated step; None for a new step."""
        last = self._replies.setdefault(owner.id, _LastReply(0))
        last.signs += 1
        if step.serial > last.serial or not step.serial:
            return None
        if step.serial < last.serial:
            raise late(step, last.serial)
        reply = last.reply
        leases = []
        for lease in reply.leases:
            item = self._jobs.leases.get((owner.id, lease.token))
            if item is not None:
                left = max(0.0, item.deadline - self._jobs.now) if item.deadline else 0.0
                leases.append(msgspec.structs.replace(lease, deadline=left))
        return Reply(
            settled=reply.settled,
            touched=reply.touched,
            leases=leases,
            commands=reply.commands,
            next_due=0.0,
        )

    def answered(self, step: Step, reply: Reply) -> None:
        if step.serial:
            last = self._replies[step.owner]
            last.serial, last.reply = step.serial, msgspec.structs.replace(reply)

    def forget(self, owner_id: str) -> None:
        self._replies.pop(owner_id, None)

    def heard(self, owner: Owner) -> SignOfLife:
        """The owner's sign of life. While its lease of a message lasts, each check is a sign."""
        now = self._jobs.now
        holds = any(
            item.deadline > now
            for (whose, _), item in self._jobs.leases.items()
            if whose == owner.id
        )
        return SignOfLife(owner.lease, now if holds else self._replies[owner.id].signs)

    def put_before(self, nonce: str) -> list[Put] | None:
        """The answer to the put with this nonce; None for a new or forgotten nonce."""
        until, puts = self._puts.get(nonce, (0.0, []))
        return puts if until > self._jobs.now else None

    def keep(self, nonce: str, puts: list[Put]) -> None:
        """Keep the answer to a put, and forget old answers."""
        if nonce:
            now = self._jobs.now
            self._puts = {name: call for name, call in self._puts.items() if call[0] > now}
            self._puts[nonce] = now + _KEEP, puts
