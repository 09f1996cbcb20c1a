"""Topics: bind queues to patterns, and publish messages to the queues that are bound."""

from __future__ import annotations

from tidemill.brokers.generic.topics import check_pattern
from tidemill.core.config import check_name
from tidemill.server.http.api.jobs import options_of
from tidemill.server.http.api.messages import value_of
from tidemill.server.http.endpoints import Call, Endpoint, Raw
from tidemill.server.http.exchange import require
from tidemill.server.http.problems import Problem
from tidemill.server.http.schemas.jobs import BindingsOut, Placed, PlacedMany, PublishQuery
from tidemill.server.tokens import Role

OPERATOR = Role.OPERATOR


async def publish(call: Call, topic: str, query: PublishQuery, body: Raw) -> PlacedMany:
    """Put a copy of the request's body into each queue that is bound to the topic.

    The body is a message as for a queue: JSON if its Content-Type is JSON, else bytes. All copies
    are put, or none. When no queue is bound, the list is empty; with ``?mandatory=true`` the answer
    is 404.
    """
    value = await call.compute(lambda: value_of(body), len(body.data))
    jobs = await call.backend.publish(topic, value, query.mandatory, options_of(query))
    return PlacedMany([Placed(job.id, "created") for job in jobs])


async def list_bindings(call: Call, queue: str) -> BindingsOut:
    """List the patterns that a queue is bound to."""
    bound = call.backend.queue(check_name("queue", queue))
    return BindingsOut(await call.backend.run(bound.bindings))


async def bind_queue(call: Call, queue: str, pattern: str) -> None:
    """Bind a queue to a pattern of topics. Binding it again changes nothing.

    A token for some queues is refused: with a binding it could read messages for other queues.
    """
    require(call.exchange.scope, OPERATOR)
    await call.backend.run(call.backend.queue(queue).bind, check_pattern(pattern))


async def unbind_queue(call: Call, queue: str, pattern: str) -> None:
    """Delete a binding. The messages of the queue stay."""
    require(call.exchange.scope, OPERATOR)
    bound = call.backend.queue(check_name("queue", queue))
    if not await call.backend.run(bound.unbind, check_pattern(pattern)):
        raise Problem("not-found", f"the queue {queue!r} is not bound to {pattern!r}")


ENDPOINTS = (
    Endpoint("POST", "/v1/topics/{topic}/messages", publish, status=201, also=(507,)),
    Endpoint("GET", "/v1/queues/{queue}/bindings", list_bindings),
    Endpoint("PUT", "/v1/queues/{queue}/bindings/{pattern}", bind_queue),
    Endpoint("DELETE", "/v1/queues/{queue}/bindings/{pattern}", unbind_queue),
)
