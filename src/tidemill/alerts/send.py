"""Send a message of an alert: a POST to a webhook, or a command. Each try has a time limit."""

from __future__ import annotations

import http.client
import os
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request

import msgspec

from tidemill.alerts.rules import Target
from tidemill.brokers.network.address import opener_without_redirects

_LAST_LINES = 10_000  # bytes
_PAUSES = (1.0, 4.0, 16.0)  # seconds before the next tries


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The message. A webhook gets JSON; a command gets environment variables, and JSON on stdin."""

    event: str  # ``begin``, ``reminder``, ``end`` or ``test``
    text: str  # the alert in one sentence; chat systems such as Slack show this field
    rule: str
    when: str
    queue: str
    value: float
    above: float
    began: float  # epoch seconds of the alert's beginning
    at: float  # epoch seconds of this message
    store: str  # the URL of the store
    host: str  # the machine that watches


class SendFailed(Exception):
    """The message did not arrive; the text says why."""


def send(target: Target, message: Message, stop: threading.Event) -> None:
    """Send the message, with ``target.tries`` tries. Raises SendFailed, also after ``stop``."""
    for number in range(target.tries):
        try:
            _run(target, message) if target.command else _post(target, message)
            return
        except SendFailed:
            pause = _PAUSES[min(number, len(_PAUSES) - 1)]
            if number + 1 == target.tries or stop.wait(pause):
                raise


def _post(target: Target, message: Message) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "tidemill", **target.headers}
    request = urllib.request.Request(
        target.webhook, msgspec.json.encode(message), headers, method="POST"
    )
    try:
        with opener_without_redirects().open(request, timeout=target.timeout):
            pass
    except urllib.error.HTTPError as error:
        remedy = "; write the address that it redirects to" if error.code < 400 else ""
        raise SendFailed(f"the webhook answered {error.code} {error.reason}{remedy}") from error
    except http.client.HTTPException as error:
        raise SendFailed("the webhook does not answer in HTTP") from error
    except ValueError:  # the text of this error may contain a secret from a header
        raise SendFailed(
            "the webhook's address or a header has a character that HTTP forbids"
        ) from None
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise SendFailed(f"the webhook does not answer: {reason}") from error


def _run(target: Target, message: Message) -> None:
    values = msgspec.to_builtins(message)
    env = {f"TIDEMILL_ALERT_{name.upper()}": str(value) for name, value in values.items()}
    # A pipe would stay open for as long as a child of the command lives.
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                target.command,
                input=msgspec.json.encode(message),
                env={**os.environ, **env},
                timeout=target.timeout,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SendFailed(f"the command did not end within {target.timeout:g} s") from None
        except OSError as error:
            raise SendFailed(
                f"the command {target.command[0]} cannot run: {error.strerror}"
            ) from error
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST_LINES))
        said = errors.read(_LAST_LINES)
    if done.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise SendFailed(
            f"the command ended with {done.returncode}{f': {lines[-1]}' if lines else ''}"
        )
