"""Owners elsewhere: what each said last, how it was answered, and which puts were accepted."""

from __future__ import annotations

import msgspec

from tidemill.brokers.base import Reply, Step
from tidemill.brokers.memory.jobs import Jobs
from tidemill.brokers.silence import Heard
from tidemill.brokers.steps import late
from tidemill.job import Owner, Put

__all__ = ["Elsewhere"]

_KEEP = 600.0


class _Said:
    """The last step of an owner."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.reply = Reply()
        self.words = 0


class Elsewhere:
    """All that is known of owners elsewhere besides what they hold."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._said: dict[str, _Said] = {}
        self._puts: dict[str, tuple[float, list[Put]]] = {}  # nonce -> until when, the answer

    # -- steps ----------------------------------------------------------------------------------

    def attached(self, owner: Owner) -> None:
        """It attached, perhaps once more: that is a word, too."""
        said = self._said.setdefault(owner.id, _Said(0))
        said.words += 1
        if owner.serial > said.serial:
            said.serial, said.reply = owner.serial, Reply()

    def known(self, owner: Owner, step: Step) -> Reply | None:
        """The answer to a repetition; None for a step that is new."""
        said = self._said.setdefault(owner.id, _Said(0))
        said.words += 1
        if step.serial > said.serial or not step.serial:
            return None
        if step.serial < said.serial:
            raise late(step, said.serial)
        reply = said.reply
        leases = []
        for lease in reply.leases:
            item = self._jobs.leases.get((owner.id, lease.token))
            if item is not None:
                left = max(0.0, item.deadline - self._jobs.now) if item.deadline else 0.0
                leases.append(msgspec.structs.replace(lease, deadline=left))
        return Reply(
            settled=reply.settled,
            touched=reply.touched,
            taken=reply.taken,
            leases=leases,
            commands=reply.commands,
            next_due=0.0,
        )

    def answered(self, step: Step, reply: Reply) -> None:
        """Keep what a step was told."""
        if step.serial:
            said = self._said[step.owner]
            said.serial, said.reply = step.serial, msgspec.structs.replace(reply)

    def forget(self, owner_id: str) -> None:
        """It is off the list."""
        self._said.pop(owner_id, None)

    def heard(self, owner: Owner) -> Heard:
        """What its silence is counted by; not while a consumer's ttr runs."""
        now = self._jobs.now
        holds = any(
            item.deadline > now
            for (whose, _), item in self._jobs.leases.items()
            if whose == owner.id
        )
        return Heard(owner.lease, now if holds else self._said[owner.id].words)

    # -- puts -----------------------------------------------------------------------------------

    def put_before(self, nonce: str) -> list[Put] | None:
        """What the call with this nonce was told; None when there was none, or too long ago."""
        until, puts = self._puts.get(nonce, (0.0, []))
        return puts if until > self._jobs.now else None

    def keep(self, nonce: str, puts: list[Put]) -> None:
        """Remember a call, and forget those of long ago."""
        if nonce:
            now = self._jobs.now
            self._puts = {name: call for name, call in self._puts.items() if call[0] > now}
            self._puts[nonce] = now + _KEEP, puts
