"""The address of the server: the parts of its URL.

    http://:TOKEN@host:8333      the token as the password; or ?token_file=PATH, or the environment
    https://host/jobs?ca=PATH    behind a path of a proxy, with a certificate authority of your own

Without a port, the port is the default of the scheme: 80 or 443.
"""

from __future__ import annotations

import os
import re
import ssl
import urllib.parse

import msgspec

from tidemill.brokers.contract.retention import number_option
from tidemill.core.config import Url, check_known
from tidemill.errors import BrokerUnavailable, InvalidOption

TOKEN = "TIDEMILL_TOKEN"  # the environment variable with the token, when the URL has none
_OPTIONS = ("ca", "cert", "key", "owner_lease", "patience", "token_file")
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a URL.

    ``ca`` is a file of certificates to trust instead of the system's. ``cert`` and ``key`` are the
    client's certificate and key. ``shown`` is the URL without its token.
    """

    host: str
    port: int
    prefix: str = ""
    tls: bool = False
    secret: str = ""
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    patience: float = 10.0
    owner_lease: float = 30.0
    shown: str = ""

    @property
    def where(self) -> str:
        """Host and port, for messages and for the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def token(self) -> str:
        """The token to send; a token file is read each time. Raises BrokerUnavailable."""
        token = self.secret
        if self.token_file:
            try:
                with open(self.token_file, encoding="ascii") as file:
                    token = file.read().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise BrokerUnavailable(
                    f"cannot read the token_file {self.token_file!r} of {self.shown}: {error}"
                ) from error
        elif not token:
            token = os.environ.get(TOKEN, "").strip()  # a secret may end with a newline
        if token and not _TOKEN.fullmatch(token):
            raise BrokerUnavailable(f"the token for {self.shown} has invalid characters")
        return token

    def context(self) -> ssl.SSLContext | None:
        """The TLS context; None for ``http://``. Raises BrokerUnavailable for a bad certificate."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:
            raise BrokerUnavailable(
                f"cannot use the certificates that {self.shown} names: {error}"
            ) from error
        return context


def check_url(url: Url) -> Address:
    """Read an ``http://`` or ``https://`` URL. Raises InvalidOption."""
    options = url.options
    check_known(f"an {url.scheme}:// url", options, _OPTIONS)
    shown = re.sub(r"(://)[^/?#]*@", r"\1***@", url.text)
    try:
        parts = urllib.parse.urlsplit(url.text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidOption(f"url {shown!r} cannot be read: {error}") from None
    if not host or port == 0:
        raise InvalidOption(f"url {shown!r} names no server; write http://host:8333")
    lease = number_option(options, "owner_lease", 30.0)
    if not 1 <= lease <= 86400:
        raise InvalidOption(f"owner_lease in the url must be 1 to 86400 seconds, not {lease:g}")
    secret = urllib.parse.unquote(parts.password or parts.username or "")
    if secret and "token_file" in options:
        raise InvalidOption(f"url {shown!r} has a token and a token_file; drop one")
    tls = url.scheme == "https"
    files = [name for name in ("ca", "cert", "key") if name in options]
    if files and not tls:
        raise InvalidOption(f"{files[0]}= in the url is for https://, and {shown!r} is http://")
    if "key" in options and "cert" not in options:
        raise InvalidOption("key= in the url belongs to a cert=; give both")
    return Address(
        host=host,
        port=port or (443 if tls else 80),
        prefix=parts.path.rstrip("/"),
        tls=tls,
        secret=secret,
        token_file=options.get("token_file", ""),
        ca=options.get("ca", ""),
        cert=options.get("cert", ""),
        key=options.get("key", ""),
        patience=number_option(options, "patience", 10.0),
        owner_lease=lease,
        shown=shown,
    )
