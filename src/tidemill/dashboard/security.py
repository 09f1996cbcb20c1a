"""Protection of the dashboard's forms, and the headers of every answer.

A form carries a token: the HMAC of the user's name and of a random value in a cookie. Only pages of
this site can read the token. A page of another site has no token, and the browser adds no cookie to
its requests.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

import msgspec

from tidemill.dashboard.request import Request

CSRF_COOKIE = "tidemill_csrf"
CSRF_FIELD = "csrf"

_SEED = re.compile(r"[A-Za-z0-9_-]{22,64}")

HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


class Signer:
    """Makes and checks tokens with one secret.

    Args:
        secret: the same text in each process that serves the dashboard.
        keys: the ``secret_keys`` of the app: the first key replaces an empty ``secret``. Without a
            ``secret`` and keys, the secret is random.
    """

    def __init__(self, secret: str | bytes = "", keys: Sequence[bytes] = ()) -> None:
        given = secret.encode() if isinstance(secret, str) else secret
        root = given or (keys[0] if keys else b"") or secrets.token_bytes(32)
        self._key = hmac.digest(root, b"tidemill dashboard", "sha256")

    def seed(self, request: Request) -> str:
        """The value of the browser's cookie, or a new value."""
        seed = request.cookies.get(CSRF_COOKIE, "")
        return seed if _SEED.fullmatch(seed) else secrets.token_urlsafe(24)

    def token(self, seed: str, user: str) -> str:
        """The token for forms of one browser and user."""
        return self._sign(f"csrf\0{user}\0{seed}".encode())

    def is_token(self, request: Request, user: str) -> bool:
        """True when a form carries the token of its browser and user."""
        seed = request.cookies.get(CSRF_COOKIE, "")
        token = request.field(CSRF_FIELD) or request.headers.get("x-csrf-token", "")
        right = self.token(seed, user)
        return bool(seed) and hmac.compare_digest(token.encode(), right.encode())

    def pack(self, values: object) -> str:
        """A small value as signed text that fits into a cookie."""
        data = msgspec.json.encode(values)
        text = base64.urlsafe_b64encode(data).decode().rstrip("=")
        return f"{text}.{self._sign(b'pack' + data)}"

    def unpack(self, text: str) -> object:
        """The value of a text that :meth:`pack` made; None for any other text."""
        body, _, signature = text.partition(".")
        try:
            data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            if hmac.compare_digest(self._sign(b"pack" + data).encode(), signature.encode()):
                return msgspec.json.decode(data)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            pass
        return None

    def _sign(self, data: bytes) -> str:
        digest = hmac.digest(self._key, data, hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def is_same_origin(request: Request) -> bool:
    """False when a header of the browser says that a page of another site sent the request."""
    site = request.headers.get("sec-fetch-site", "")
    if site:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin", "")
    return not origin or origin.partition("://")[2] == request.headers.get("host", "")
