"""API tokens with roles, in a file that holds only their hashes.

A token has 256 random bits, so its plain SHA-256 reveals nothing. The token is shown once, when it
is created. The server reads the file again after a change, so a revoked token is refused within a
second, without a restart.

A running server fails closed. An invalid file adds no tokens, but still removes tokens: a known
token stays valid only if its hash is in the file. An unreadable file changes nothing, and is read
again each second until a read succeeds.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tidemill.core.clock import clock
from tidemill.core.config import check_name
from tidemill.errors import InvalidOption
from tidemill.server.http.validation_errors import validation_message

log = logging.getLogger("tidemill.server")

PREFIX = "tidemill_"
_SHA256 = re.compile("[0-9a-f]{64}")
LOOK_EVERY = 1.0  # seconds between two checks of the file


class Role(enum.IntEnum):
    """The role of a token; each role includes the roles before it."""

    VIEWER = 1  # inspect
    OPERATOR = 2  # put, reserve, settle; cancel, retry, alter, delete jobs; pause and resume
    ADMIN = 3  # purge queues, change limits and schedules


class Token(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One token in the file. Times are epoch seconds; ``expires`` 0 means never.

    An empty list of ``queues`` is invalid: who removed the last queue did not mean all queues.
    """

    name: str
    role: str
    sha256: str
    created: float = 0.0
    expires: float = 0.0
    queues: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ()

    @property
    def rank(self) -> Role:
        return Role[self.role.upper()]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[Token] = []


def read(path: str | Path) -> list[Token]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidOption(
            f"the file of tokens {path} cannot be read: {error.strerror}; "
            f"create it with: tidemill token create NAME --auth {path}"
        ) from None
    return _parse(data, path)


def _parse(data: bytes, path: str | Path) -> list[Token]:
    try:
        tokens = msgspec.json.decode(data, type=_File).tokens
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path} is not a file of tokens: not UTF-8: {error.reason}") from None
    except msgspec.MsgspecError as error:
        raise InvalidOption(
            f"{path} is not a file of tokens: {validation_message(error, _File)}"
        ) from None
    for token in tokens:
        if token.role.upper() not in Role.__members__:
            raise InvalidOption(f"{path}: token {token.name!r} has an unknown role: {token.role!r}")
        if not _SHA256.fullmatch(token.sha256):
            raise InvalidOption(
                f"{path}: the sha256 of token {token.name!r} must be 64 hexadecimal digits; "
                "revoke the token and create it again"
            )
    return tokens


def create(
    path: str | Path, name: str, role: Role, expires: float = 0.0, queues: Sequence[str] = ()
) -> str:
    """Add a token to the file, which is created if it is missing; return the token."""
    check_name("name of a token", name)
    secret = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    added = Token(
        name=name,
        role=role.name.lower(),
        sha256=_hash(secret).hex(),
        created=clock.wall(),
        expires=expires,
        queues=tuple(check_name("queue", queue) for queue in queues),
    )
    file = Path(path).resolve()
    with _locked(file):
        tokens = read(file) if file.exists() else []
        if any(token.name == name for token in tokens):
            raise InvalidOption(
                f"a token {name!r} exists already; revoke it first, or choose another name"
            )
        _write(file, [*tokens, added])
    return secret


def revoke(path: str | Path, name: str) -> None:
    file = Path(path).resolve()
    with _locked(file):
        tokens = read(file)
        left = [token for token in tokens if token.name != name]
        if len(left) == len(tokens):
            known = ", ".join(token.name for token in tokens) or "none"
            raise InvalidOption(f"there is no token {name!r} in {path}; it has: {known}")
        _write(file, left)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the folder, to keep both of two changes: each change replaces the file."""
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidOption(f"{file.parent} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(file: Path, tokens: list[Token]) -> None:
    """Replace the file atomically, with its owner and mode. A new file has mode 0600."""
    data = msgspec.json.format(msgspec.json.encode(_File(tokens)), indent=2)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as new:
            with contextlib.suppress(FileNotFoundError):
                before = file.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(handle, before.st_uid, before.st_gid)
                os.fchmod(handle, before.st_mode & 0o777)
            new.write(data + b"\n")
            new.flush()
            os.fsync(new.fileno())
        os.replace(name, file)
    except OSError as error:
        os.unlink(name)
        raise InvalidOption(f"{file} cannot be written: {error.strerror}") from None
    except BaseException:
        os.unlink(name)
        raise


class Tokens:
    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = self._look()
        self._known = {bytes.fromhex(token.sha256): token for token in read(path)}
        self._looked = time.monotonic()
        self._unread: int | None = None  # the errno of the latest read; None if the read succeeded

    def find(self, secret: str) -> Token | None:
        """The token with this secret, or None; in constant time."""
        self.refresh()
        shown, found = _hash(secret), None
        for digest, token in self._known.items():
            if hmac.compare_digest(digest, shown):
                found = token
        return found if found is not None and self.is_good(found) else None

    def is_good(self, token: Token) -> bool:
        """Whether a token is still in the file, unchanged, and has not expired."""
        if token.expires and token.expires <= clock.wall():
            return False
        return self._known.get(bytes.fromhex(token.sha256)) == token

    def __len__(self) -> int:
        return len(self._known)

    def _look(self) -> tuple[int, ...]:
        """Values that change with the file. ``rsync -t`` can set its mtime, but not its ctime."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return ()
        return stat.st_ino, stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size

    def refresh(self) -> None:
        """Read the file again if it has changed, at most once a second."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        try:
            data = Path(self._path).read_bytes()
        except OSError as error:  # the next check reads again, even if the file does not change
            if error.errno != self._unread:
                log.error(
                    "%s cannot be read (%s): the known tokens stay valid until it can be read",
                    self._path,
                    error.strerror,
                )
            self._unread = error.errno
            return
        self._stamp, self._unread = stamp, None
        try:
            tokens = _parse(data, self._path)
        except InvalidOption as error:
            written = data.lower()
            tokens = [it for it in self._known.values() if it.sha256.encode() in written]
            log.error("%s; a known token stays valid if its sha256 is in the file", error)
        self._known = {bytes.fromhex(token.sha256): token for token in tokens}
