"""The jobs that an app may open: jobs signed with its keys, and jobs that need no keys.

A job that runs hands its result on to the jobs after it, as their argument. So an app with keys
signs such a result, and accepts no other result as an argument.

An app without ``secret_keys`` cannot check the signature of a pickled body. Another app may have
the keys. So this app releases the message, and the store delivers it again later. An app with keys
fails each message whose signature is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.clock import clock
from tidemill.core.codec import sign_result, verify
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.errors import BadSignature

COMES_AGAIN = 30.0  # seconds until a message is ready again after an app without keys released it


class KeysMissing(BadSignature):
    """The job is pickled, and this app has no keys to check its signature."""


def trusted(envelope: Envelope, keys: Sequence[bytes]) -> None:
    """Refuse a job without a signature by the keys of this app.

    Raises:
        KeysMissing: the job is pickled, and the app has no keys.
        BadSignature: the job has no signature, or a signature by another key.
    """
    if keys:
        verify(envelope, keys)
    elif envelope.pickled:
        raise KeysMissing(
            "bad signature: a pickled body is only opened when it is signed; "
            "give the app its secret_keys"
        )


def hands_on(envelope: Envelope) -> bool:
    return envelope.links is not None and bool(envelope.links.next)


def sign_handed_on(verdict: Verdict, job_id: str, keys: Sequence[bytes]) -> None:
    """Sign the result of a job that :func:`hands_on` its result, if there are keys."""
    if keys and verdict.outcome == Outcome.SUCCESS:
        verdict.result = sign_result(job_id, verdict.result, keys[0])


def refusal(lease: Lease, error: Exception) -> Verdict:
    now = clock.wall()
    if isinstance(error, KeysMissing):
        return Verdict(lease.token, Outcome.RELEASE, delay=COMES_AGAIN, ended=now)
    return Verdict(lease.token, Outcome.FAIL, error=str(error), started=lease.leased, ended=now)
