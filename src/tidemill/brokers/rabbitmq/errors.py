"""Turns errors of the server into sentences for people."""

from __future__ import annotations

import re
import ssl

from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    IncompatibleProtocolError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from tidemill.brokers.rabbitmq.settings import TLS_PORT, Settings

_NO_RIGHT = "ACCESS_REFUSED - "

_REASONS = ("ConnectionClosedByBroker: (403)", "ConnectionClosedByBroker: (530)")
"""Pika's texts of ACCESS_REFUSED and NOT_ALLOWED. Other codes, such as 541, may be temporary."""

_REFUSED = (ProbableAuthenticationError, ProbableAccessDeniedError, IncompatibleProtocolError)


def _causes(error: BaseException) -> list[BaseException]:
    """An error and its causes. Pika wraps the cause of a failed connection several times."""
    found = [error]
    for inner in getattr(error, "exceptions", ()) or ():
        found += _causes(inner)
    inner = getattr(error, "exception", None)
    if isinstance(inner, BaseException):
        found += _causes(inner)
    return found


_WANTS_OURS = "wants a client certificate (tls_cert= and tls_key= in the url)"


def is_final(error: BaseException) -> bool:
    """True when trying again will not help: user, password, vhost or a certificate is wrong."""
    return any(_is_refusal(cause) or _of_tls(cause) for cause in _causes(error))


def _is_refusal(cause: BaseException) -> bool:
    """True when the server itself has refused the connection."""
    # Pika raises the same exceptions when the connection is lost at this moment, for example
    # because the server starts or stops. Only the text of the exception shows the difference.
    text = str(cause.args)
    return isinstance(cause, _REFUSED) and any(reason in text for reason in _REASONS)


def _of_tls(cause: BaseException) -> str:
    """The sentence for an error of certificates or of TLS; empty for other errors."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = cause.verify_message.rstrip(".")
        hint = "" if "mismatch" in why else " (tls_ca= in the url says who may sign it)"
        return f"has a certificate that is not trusted: {why}{hint}"
    text = str(cause)
    if "ALERT_CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
        return _WANTS_OURS
    if "WRONG_VERSION_NUMBER" in text:
        return f"does not speak TLS there; amqps:// is for a port that does, such as {TLS_PORT}"
    return ""


def with_grant(why: str, settings: Settings) -> str:
    """The server's text, with the command that grants a right if the user lacks that right."""
    if not why.startswith(_NO_RIGHT):
        return why
    prefix = re.escape(settings.prefix.partition(".")[0])
    rights = f"'^{prefix}\\.' '^(amq\\.default$|{prefix}\\.)' '^{prefix}\\.'"
    command = f"rabbitmqctl set_permissions -p {settings.vhost} {settings.user} {rights}"
    return f"{why}; grant the right with: {command}"


def sentence(error: BaseException, settings: Settings) -> str:
    """The reason why the server cannot be used."""
    causes = _causes(error)
    where = settings.where
    for cause in causes:
        if of_tls := _of_tls(cause):
            return f"rabbitmq at {where} {of_tls}"
        if isinstance(cause, ProbableAuthenticationError) and _is_refusal(cause):
            return f"rabbitmq at {where} refuses the user {settings.user!r} or its password"
        if isinstance(cause, ProbableAccessDeniedError) and _is_refusal(cause):
            return f"rabbitmq at {where} does not let {settings.user!r} in: check the vhost"
        if isinstance(cause, ChannelClosedByBroker) and cause.reply_text.startswith(_NO_RIGHT):
            return f"rabbitmq at {where}: {with_grant(cause.reply_text, settings)}"
        if isinstance(cause, ConnectionClosedByBroker):
            return f"rabbitmq at {where} closed the connection: {cause.reply_text}"
    # TLS may end without a reason: the alert of a busy server may not arrive.
    was_cut = any("EOF occurred in violation" in str(cause) for cause in causes)
    if settings.tls is not None and "tls_cert" not in settings.tls and was_cut:
        return f"rabbitmq at {where} closed the connection; perhaps it {_WANTS_OURS}"
    last = next((c for c in reversed(causes) if str(c)), error)
    reason = str(last) or type(last).__name__
    if isinstance(last, AMQPConnectionError) and last.args:
        reason = str(last.args[0]) or reason
    return f"cannot reach rabbitmq at {where}: {reason}; start it, or correct the url"
