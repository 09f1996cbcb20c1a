"""The calls of the contract as messages between a job server and the ``http://`` broker.

A call is ``POST /v1/broker/NAME``. Its body has the arguments, by name, as msgpack; the answer is
msgpack, too. The types of the arguments and the answer follow from the signatures in the contract.
An error is sent as its name, with the message and the fields.

A call that changes something has a key (:data:`KEY`). When the caller repeats the call because the
reply was lost, the server answers again, but does not repeat the effects. A put has a nonce, and a
step has a serial, instead of a key: the store itself remembers nonces and serials.

Scoreboards, forks and ``txn=`` concern either the client or the server alone, and have no message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import GenericAlias
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from tidemill import errors
from tidemill.brokers.contract.history import History
from tidemill.brokers.contract.limits import LimitCalls
from tidemill.brokers.contract.store import Store
from tidemill.errors import BrokerUnavailable, TidemillError

VERSION = "1"  # the version of the protocol. It changes when messages become incompatible.
PATH = "/v1/broker/"
MEDIA = "application/msgpack"
PROTOCOL = "tidemill-protocol"  # the header with the version, in both directions
SERVER = "tidemill-server"  # the header with the id of the server process, which a restart changes
KEY = "idempotency-key"  # the header with the key of a call that must be done only once
MOST = 128 * 1024 * 1024  # the most bytes of the arguments of one call
LONGEST = 25.0  # the most seconds that a server lets a call wait: proxies give up after a minute


class Role:
    """The role that a call needs. Each role includes the roles before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class NotAllowed(BrokerUnavailable):
    """The role of the token does not allow the call."""


class Hello(msgspec.Struct):
    """The features and the id of the server's store, and the most bytes of one call's arguments."""

    features: list[str]
    most: int
    identity: str


class Refusal(msgspec.Struct, array_like=True):
    """An error as a message."""

    name: str
    message: str
    fields: dict[str, str] = {}

    @classmethod
    def of(cls, error: TidemillError) -> Refusal:
        """The message of an error; a private error class is sent as its public base class."""
        names = [kind.__name__ for kind in type(error).__mro__]
        name = next(name for name in names if name in errors.__all__)
        fields = {key: value for key, value in vars(error).items() if isinstance(value, str)}
        return cls(name, str(error), fields)

    def error(self) -> TidemillError:
        known = self.name if self.name in errors.__all__ else "TidemillError"
        kind: type[TidemillError] = getattr(errors, known)
        error = kind.__new__(kind, self.message)
        error.args = (self.message,)
        vars(error).update(self.fields)
        return error


class Call:
    """One call: the role it needs, and the encoding of its arguments and its answer.

    A call with ``once`` has a key. A call with ``waits`` may sleep. The answer of a call with
    ``shows`` has arguments, results or keys of jobs.
    """

    def __init__(
        self, method: Callable[..., Any], role: str, *, once: bool = False, waits: bool = False
    ) -> None:
        self.name = method.__name__
        self.role = role
        self.shows = self.name in _SHOW
        self.once = once
        self.waits = waits
        arguments, answer = _signature(method)
        self._arguments = msgspec.msgpack.Decoder(arguments)
        self._answer = msgspec.msgpack.Decoder(answer)
        self._names = arguments.__struct_fields__

    def write(self, arguments: dict[str, Any]) -> bytes:
        return encode(arguments)

    def read(self, body: bytes) -> dict[str, Any]:
        """The arguments of a body.

        Raises:
            msgspec.DecodeError: the body has other arguments.
        """
        arguments = self._arguments.decode(body)
        return {name: getattr(arguments, name) for name in self._names}

    def read_answer(self, body: bytes) -> Any:
        """The answer of a body.

        Raises:
            msgspec.DecodeError: the body has another type.
        """
        return self._answer.decode(body)


encode = msgspec.msgpack.Encoder(enc_hook=list).encode
"""Encodes arguments and answers. Other iterables than lists are sent as lists."""

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


class _OfServer:
    """The calls that a server adds to the contract. Only their signatures are read."""

    def hello(self) -> Hello:
        """Tell what the server and its store can do."""
        raise NotImplementedError

    def wait(self, owner_id: str, timeout: float, server: str) -> bool:
        """Wait for an owner's hint; True when something may have happened.

        ``server`` is the id of the server that answered the owner's last exchange. Another server
        has no hints for this owner.
        """
        raise NotImplementedError

    def present(self, owner_ids: list[str], timeout: float) -> bool:
        """Show that consumers live, as long as the connection is open; then call again."""
        raise NotImplementedError


_CONTRACT = (_OfServer, Store, LimitCalls, History)
_READ = "get was_here find ahead stats owners info hello history history_kinds limits held wall"
_CHANGE = "attach detach release command cancel retry delete alter set_queue forget_queue set_limit"
_SHOW = frozenset(["get", "find", "wait_for", "held", "history", "schedules", "list_schedules"])
"""The calls whose answers have arguments, results or keys of jobs."""


def _calls(names: str, role: str, *, once: bool = False, waits: bool = False) -> dict[str, Call]:
    """Calls by their names in the contract."""
    calls = {}
    for name in names.split():
        method = next(getattr(part, name) for part in _CONTRACT if hasattr(part, name))
        calls[name] = Call(method, role, once=once, waits=waits)
    return calls


CALLS: dict[str, Call] = {
    **_calls(f"{_READ} schedules list_schedules", Role.VIEWER),
    **_calls("wait_for wait_space", Role.VIEWER, waits=True),
    **_calls("wait present", Role.OPERATOR, waits=True),
    **_calls("put exchange tick", Role.OPERATOR),
    **_calls(f"{_CHANGE} change_schedules keep_history", Role.OPERATOR, once=True),
    **_calls("backup depart stay adopt", Role.ADMIN, once=True),
    **_calls("adopted", Role.ADMIN),
}
"""Every call, by name."""
