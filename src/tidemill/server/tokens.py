"""Who may do what: tokens with roles, in a file that holds their hashes alone.

A token is 256 random bits, so a plain SHA-256 of it gives nothing away: there is nothing to guess.
It is shown once, when it is made. The file is read again when it has changed, so that a revoked
token is refused a second later, with no restart.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import os
import secrets
import tempfile
import time
from pathlib import Path

import msgspec

from tidemill.config import check_name
from tidemill.errors import InvalidOption

__all__ = ["Role", "Token", "Tokens", "create", "read", "revoke"]

PREFIX = "tidemill_"
LOOK_EVERY = 1.0
"""Seconds after which the file is looked at again."""


class Role(enum.IntEnum):
    """What a token is good for; each may do what those before it may."""

    VIEWER = 1  # look
    OPERATOR = 2  # put, reserve, settle; cancel, retry, delete jobs; pause and resume
    ADMIN = 3  # purge queues, change limits and schedules


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token as the file has it. Times are epoch seconds; ``expires`` 0 means never."""

    name: str
    role: str
    sha256: str
    created: float = 0.0
    expires: float = 0.0

    @property
    def rank(self) -> Role:
        """Its role."""
        return Role[self.role.upper()]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[Token] = []


def read(path: str | Path) -> list[Token]:
    """The tokens of a file.

    Raises:
        InvalidOption: it cannot be read, or is none.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidOption(
            f"the file of tokens {path} cannot be read: {error.strerror}; "
            f"make one with: tidemill token create NAME --auth {path}"
        ) from None
    try:
        tokens = msgspec.json.decode(data, type=_File).tokens
    except msgspec.MsgspecError as error:
        raise InvalidOption(f"{path} is no file of tokens: {error}") from None
    for token in tokens:
        if token.role.upper() not in Role.__members__:
            raise InvalidOption(f"{path}: token {token.name!r} has no known role: {token.role!r}")
    return tokens


def create(path: str | Path, name: str, role: Role, expires: float = 0.0) -> str:
    """Add a token to the file, which is made if it is not there; the token itself.

    Raises:
        InvalidOption: there is one of this name.
    """
    check_name("name of a token", name)
    tokens = read(path) if Path(path).exists() else []
    if any(token.name == name for token in tokens):
        raise InvalidOption(f"there is a token {name!r} already; revoke it first, or take another")
    secret = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    added = Token(
        name=name,
        role=role.name.lower(),
        sha256=_hash(secret).hex(),
        created=time.time(),
        expires=expires,
    )
    _write(Path(path), [*tokens, added])
    return secret


def revoke(path: str | Path, name: str) -> None:
    """Take a token out of the file.

    Raises:
        InvalidOption: there is none of this name.
    """
    tokens = read(path)
    left = [token for token in tokens if token.name != name]
    if len(left) == len(tokens):
        known = ", ".join(token.name for token in tokens) or "none"
        raise InvalidOption(f"there is no token {name!r} in {path}; it has: {known}")
    _write(Path(path), left)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _write(path: Path, tokens: list[Token]) -> None:
    """Replace the file as one step; only its owner may read it."""
    data = msgspec.json.format(msgspec.json.encode(_File(tokens)), indent=2)
    folder = path.absolute().parent
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class Tokens:
    """The tokens of a file, as they are now."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = self._look()
        self._known = self._load()
        self._looked = time.monotonic()

    def find(self, secret: str) -> Token | None:
        """The token a client shows, if it is one. Takes as long whichever of them it is."""
        self._refresh()
        shown, found = _hash(secret), None
        for digest, token in self._known:
            if hmac.compare_digest(digest, shown):
                found = token
        if found is not None and found.expires and found.expires <= time.time():
            return None
        return found

    def __len__(self) -> int:
        return len(self._known)

    def _load(self) -> list[tuple[bytes, Token]]:
        return [(bytes.fromhex(token.sha256), token) for token in read(self._path)]

    def _look(self) -> tuple[int, int, int]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return 0, 0, 0
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        try:
            self._known = self._load()
        except InvalidOption:  # gone or spoilt: nobody gets in by what it said before
            self._known = []
        self._stamp = stamp
