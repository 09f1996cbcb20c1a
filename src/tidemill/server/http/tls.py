"""TLS: the certificates of the server."""

from __future__ import annotations

import ssl

from tidemill.core.errors import InvalidOption
from tidemill.server.settings import Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context of the server; None for a server without TLS.

    Raises:
        InvalidOption: a file cannot be used; the message names the file.
    """
    files = {
        "--tls-cert": settings.tls_cert,
        "--tls-key": settings.tls_key,
        "--tls-ca": settings.tls_ca,
    }
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for option, path in files.items():
        try:
            if path:
                with open(path, "rb"):  # an error of OpenSSL does not name the file
                    pass
            if path and option == "--tls-ca":
                context.load_verify_locations(path)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise InvalidOption(f"{option} {path} cannot be used: {_reason(error)}") from None
    if not settings.tls_cert:
        return None
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise InvalidOption(
            f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} cannot be used "
            f"together: {_reason(error)}"
        ) from None
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "the file is not PEM").lower().replace("_", " ")
    return error.strerror or str(error)
