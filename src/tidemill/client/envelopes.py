"""Make the envelope of a job from a call: encode the arguments, check them, sign the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.client.argument_check import pack_checked_call
from tidemill.client.arguments import TEXT_OF_BODY, summary
from tidemill.client.call import Call
from tidemill.client.events import headers_of
from tidemill.client.task import warn_if_local
from tidemill.core.clock import clock, new_id
from tidemill.core.codec import pack_pickle_call, pack_plain_call, sign
from tidemill.core.config import check_name, check_size
from tidemill.core.envelope import Envelope, Links

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


def envelope_of(
    mill: Runtime, call: Call[object], job_id: str = "", links: Links | None = None
) -> Envelope:
    """The envelope of a call's job. If ``job_id`` is empty, the call's options may give the id."""
    if call.missing is not None:
        raise call.missing
    options = call.options
    if options.given is not None:
        mill.features.use(options)  # before the store is asked for the declared options
        options = mill.declarations.complete(call.task, options)
    mill.features.use(options)
    args, kwargs = call.args, call.kwargs
    if mill.local_tasks and call.task in mill.local_tasks:
        warn_if_local(mill, call.task)
    envelope = options.envelope()
    envelope.task = call.task
    if mill.event_handlers["enqueue"]:
        envelope.headers = headers_of(
            mill.event_handlers["enqueue"], call, options.queue, options.tags
        )
    envelope.body = _body(mill, call)
    if not isinstance(options.key, str):
        envelope.key = check_name("key", options.key(*args, **kwargs))
    if options.limit is not None:
        envelope.limit = mill.limits.claim(options.limit, call.task, args, kwargs)
    if len(envelope.body) <= TEXT_OF_BODY:
        envelope.text = summary(args, kwargs)
    if job_id:
        envelope.id = check_name("id", job_id)
    envelope.links = links
    return seal(mill, envelope)


def _body(mill: Runtime, call: Call[object]) -> bytes:
    if mill.pickles:
        return pack_pickle_call(call.args, call.kwargs)
    body = pack_plain_call(call.args, call.kwargs)
    if body is not None:
        return body
    task = mill.tasks.get(call.task)
    arguments = None if task is None else task.arguments
    return pack_checked_call(call.task, arguments, call.args, call.kwargs)


def seal(mill: Runtime, envelope: Envelope) -> Envelope:
    """Complete an envelope: check its size, and add its id, its time and its signature."""
    check_size(envelope.body, envelope.headers, envelope.tags)
    envelope.id = envelope.id or new_id()
    envelope.created = clock.wall()
    envelope.pickled = mill.pickles
    if mill.keys:
        envelope.signature = sign(envelope, mill.keys[0])
    return envelope
