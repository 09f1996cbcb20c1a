"""Protection of the dashboard: the origin of each action, signed messages, and headers.

A browser names the site of the page that sends a form, in ``Sec-Fetch-Site`` or in ``Origin``. No
page can change these headers. So an action needs one of these headers, with this site.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Sequence

import msgspec

from tidemill.dashboard.request import Request

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_same_origin(request: Request) -> bool:
    """True when the browser says that a page of this site, or the user, sent the request."""
    site = request.headers.get("sec-fetch-site", "")
    if site:
        return site in ("same-origin", "none")
    host = request.headers.get("origin", "").partition("://")[2]  # Origin may be "null"
    return bool(host) and host == request.headers.get("host")


class Signer:
    """Signs the message that the page after an action shows, so that nobody else can write it.

    Args:
        secret: the same text in each process that serves the dashboard.
        keys: the ``secret_keys`` of the app: the first key replaces an empty ``secret``. Without a
            ``secret`` and keys, the secret is random.
    """

    def __init__(self, secret: str | bytes = "", keys: Sequence[bytes] = ()) -> None:
        given = secret.encode() if isinstance(secret, str) else secret
        root = given or (keys[0] if keys else b"") or secrets.token_bytes(32)
        self._key = hmac.digest(root, b"tidemill dashboard", "sha256")

    def pack(self, values: tuple[str, str]) -> str:
        """Two texts as one signed text for a cookie."""
        text = base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")
        return f"{text}.{self._sign(text)}"

    def unpack(self, packed: str) -> list[tuple[str, str]]:
        """The two texts that :meth:`pack` was given; nothing for any other text."""
        text, _, signature = packed.partition(".")
        if not hmac.compare_digest(self._sign(text).encode(), signature.encode()):
            return []
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return [msgspec.json.decode(data, type=tuple[str, str])]

    def _sign(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(), "sha256").hex()
