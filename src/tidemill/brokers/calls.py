"""The calls of the seam as messages, which the job server and ``http://`` exchange.

A call is ``POST /v1/broker/NAME`` with its arguments as msgpack, by the names that they have in the
seam; the answer is what the seam says, in msgpack too. Both follow from the seam's own signatures,
so it is told once. A refusal crosses by the name of its error, with the sentence and the fields.

A call that changes something has a key of its own (:data:`KEY`): when it is repeated, since its
reply was lost, the server answers it again and does not do it again. A put has a nonce instead and
a step its serial, which the store itself remembers.

What is not here stays on its own side: boards and forks, ``txn=``, whom a death concerns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import GenericAlias
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from tidemill import errors
from tidemill.brokers.base import Broker
from tidemill.brokers.limiting import Limiting
from tidemill.brokers.unknown import Unknown
from tidemill.errors import TidemillError

__all__ = [
    "CALLS",
    "KEY",
    "LONGEST",
    "MEDIA",
    "MOST",
    "PATH",
    "PROTOCOL",
    "SERVER",
    "VERSION",
    "Call",
    "Hello",
    "Refusal",
    "Role",
    "encode",
]

VERSION = "1"
"""Changed when what one side says can no longer be read by the other."""

PATH = "/v1/broker/"
MEDIA = "application/msgpack"
PROTOCOL = "tidemill-protocol"
"""The header with the version, in both directions."""

SERVER = "tidemill-server"
"""The header by which a server tells itself from one that was there before it."""

KEY = "idempotency-key"
"""The header with the name of a call that is to be done once."""

MOST = 128 * 1024 * 1024
"""Bytes that the arguments of one call may have."""

LONGEST = 25.0
"""Seconds that a server holds a call which waits: proxies give up on those that take a minute."""


class Role:
    """Who may make a call. Each may do what those before may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Hello(msgspec.Struct):
    """What a server says of its store, and how many bytes the arguments of a call may have.

    ``identity`` tells the store from every other, if it lends its jobs to carriers.
    """

    features: list[str]
    most: int = MOST
    identity: str = ""


class Refusal(msgspec.Struct, array_like=True):
    """An error, as it crosses."""

    name: str
    message: str
    fields: dict[str, str] = {}

    @classmethod
    def of(cls, error: TidemillError) -> Refusal:
        """An error of ours; one without a public name goes as the nearest that has one."""
        names = [kind.__name__ for kind in type(error).__mro__]
        name = next(name for name in names if name in errors.__all__)
        fields = {key: value for key, value in vars(error).items() if isinstance(value, str)}
        return cls(name, str(error), fields)

    def error(self) -> TidemillError:
        """The error itself."""
        known = self.name if self.name in errors.__all__ else "TidemillError"
        kind: type[TidemillError] = getattr(errors, known)
        error = kind.__new__(kind, self.message)
        error.args = (self.message,)
        vars(error).update(self.fields)
        return error


class Call:
    """One call: who may make it, how its arguments and its answer are written.

    With ``once`` it has a key; ``waits`` says that it may sleep.
    """

    def __init__(
        self, method: Callable[..., Any], role: str, *, once: bool = False, waits: bool = False
    ) -> None:
        self.name = method.__name__
        self.role = role
        self.once = once
        self.waits = waits
        arguments, answer = _signature(method)
        self._arguments = msgspec.msgpack.Decoder(arguments)
        self._answer = msgspec.msgpack.Decoder(answer)
        self._names = arguments.__struct_fields__

    def write(self, arguments: dict[str, Any]) -> bytes:
        """Arguments as a body."""
        return encode(arguments)

    def read(self, body: bytes) -> dict[str, Any]:
        """The arguments of a body.

        Raises:
            msgspec.DecodeError: these are none.
        """
        arguments = self._arguments.decode(body)
        return {name: getattr(arguments, name) for name in self._names}

    def read_answer(self, body: bytes) -> Any:
        """The answer of a body.

        Raises:
            msgspec.DecodeError: this is none.
        """
        return self._answer.decode(body)


encode = msgspec.msgpack.Encoder().encode
"""Of answers, too."""

_LOCAL = ("txn", "fds", "self")


def _signature(method: Callable[..., Any]) -> tuple[type[msgspec.Struct], Any]:
    """The arguments of a call as a struct, and the type of its answer."""
    hints = get_type_hints(method)
    fields: list[Any] = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name in _LOCAL:
            continue
        kind = hints[name]
        if get_origin(kind) is Iterable:
            kind = GenericAlias(list, get_args(kind))
        if parameter.default is inspect.Parameter.empty:
            fields.append((name, kind))
        else:
            fields.append((name, kind, parameter.default))
    return msgspec.defstruct(method.__name__, fields, kw_only=True), hints["return"]


def _hello() -> Hello:
    raise NotImplementedError  # never called: only its signature is read


_hello.__name__ = "hello"

_LOOK: tuple[Callable[..., Any], ...] = (
    *(_hello, Broker.get, Broker.was_here, Broker.find, Broker.stats, Broker.owners, Broker.info),
    *(Broker.schedules, Broker.list_schedules, Limiting.limits, Limiting.held),
    Unknown.unknown_tasks,
)
_WAIT = (Broker.wait_for, Broker.wait_space)
_WORK = (Broker.put, Broker.exchange, Broker.tick)
_ACT: tuple[Callable[..., Any], ...] = (
    *(Broker.attach, Broker.detach, Broker.release, Broker.recall, Broker.command),
    *(Broker.cancel, Broker.kick, Broker.delete, Broker.set_queue),
    *(Broker.change_schedules, Limiting.set_limit),
)
_ADMINISTER: tuple[Callable[..., Any], ...] = (
    *(Broker.purge, Broker.forget_queue),
    *(Broker.depart, Broker.stay, Broker.adopt, Broker.backup),
)


async def _sleep(owner_id: str, timeout: float, server: str) -> bool:
    """A wait of an owner's, as it is told: True when something may have happened.

    ``server`` is the one that answered the owner's last exchange: another knows of no hint.
    """
    raise NotImplementedError  # never called: only its signature is read


_sleep.__name__ = "wait"

CALLS: dict[str, Call] = {
    call.name: call
    for call in (
        *[Call(method, Role.VIEWER) for method in _LOOK],
        *[Call(method, Role.VIEWER, waits=True) for method in _WAIT],
        Call(_sleep, Role.OPERATOR, waits=True),
        *[Call(method, Role.OPERATOR) for method in _WORK],
        *[Call(method, Role.OPERATOR, once=True) for method in _ACT],
        *[Call(method, Role.ADMIN, once=True) for method in _ADMINISTER],
        Call(Broker.adopted, Role.ADMIN),
    )
}
"""Every call, by name."""
