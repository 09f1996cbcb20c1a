"""Tasks of the tests: of Django's framework, and of tidemill."""

import datetime as dt
import time

from django.db import connection

import tidemill.django
from shop.framework import task
from shop.models import Customer, Order
from tidemill import Fail, this_job
from tidemill.django import mill


@task()
def noop(*args, **kwargs):
    """Do nothing."""


@task()
async def noop_async(*args, **kwargs):
    """Do nothing, in an event loop."""


@task()
def add(a, b):
    """Add."""
    return a + b


@task()
async def add_async(a, b):
    """Add, in an event loop."""
    return a + b


@task()
def echo(*args, **kwargs):
    """Return the arguments."""
    return [list(args), kwargs]


@task()
def failing():
    """Fail."""
    raise ValueError("This task failed due to ValueError")


@task()
def failing_complex():
    """Fail with an exception that has no pickle."""
    raise ValueError(ValueError("This task failed"))


@task()
def failing_interrupt():
    """Fail with a BaseException."""
    raise SystemExit("no")


@task()
def interrupts():
    """Fail as if somebody had pressed Ctrl-C."""
    raise KeyboardInterrupt("This task failed due to KeyboardInterrupt")


@task()
def sleeps(seconds):
    """Report that the task has begun, and take time."""
    this_job().progress(0, seconds)
    time.sleep(seconds)


@task()
def returns_object():
    """Return what JSON does not have."""
    return lambda: True


@task(takes_context=True)
def with_context(context):
    """Return what the context says."""
    result = context.task_result
    return [context.attempt, result.id, str(result.status), result.attempts, len(result.worker_ids)]


@task()
def count_orders():
    """Read the database."""
    return Order.objects.count()


@task()
async def count_orders_async():
    """Read the database from an event loop."""
    return await Order.objects.acount()


@mill.task
def orders_are_counted():
    """Return what an event loop has yet to await."""
    return Order.objects.acount()


@task(backend="second")
def on_second():
    """Run in the store of another alias."""
    return "second"


@task(backend="immediate")
def on_immediate():
    """A task of another backend."""
    return "immediate"


@tidemill.django.task(retries=2, timeout=30, tags=["mail"], queue_name="queue-1")
def with_options(fail):
    """A task with options of tidemill."""
    if fail:
        raise RuntimeError(f"attempt {this_job().attempt}")
    return list(this_job().tags)


@tidemill.django.task(retries=5)
def gives_up():
    """Fail for good."""
    raise Fail("no such user")


@tidemill.django.task(retries=1, takes_context=True)
def fails_once(context):
    """Fail the first time."""
    if context.attempt == 1:
        raise RuntimeError("the first time")
    return [context.attempt, len(context.task_result.errors)]


@mill.task
def rich(when: dt.datetime, raw: bytes) -> dt.datetime:
    """A task of tidemill, with types that JSON lacks."""
    assert isinstance(when, dt.datetime)
    assert isinstance(raw, bytes)
    return when


@mill.task
async def count_orders_by_a_job() -> int:
    """Put a job from an event loop, without await."""
    return await mill.job(count_orders.enqueue().id)


@mill.task
def note_of(order: Order) -> str:
    """Take a model instance by its key."""
    return order.note


@mill.task
def name_of(customer: Customer) -> str:
    """Take a model instance that has no converter."""
    return customer.name


@mill.task
def backend_pid() -> int:
    """The process of the server that serves this connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


@mill.task
def write_order(note: str) -> int:
    """Write to the database."""
    return Order.objects.create(note=note).pk


@mill.task
def was_connected() -> bool:
    """Tell whether this thread had a connection before the task used one."""
    connected = connection.connection is not None
    Order.objects.count()
    return connected


@mill.task
def sleep_for(seconds: float) -> None:
    """Take time."""
    time.sleep(seconds)


@mill.task(retries=0)
def leave_transaction_open() -> bool:
    """Leave a broken transaction behind, as an interrupted task may."""
    connection.ensure_connection()
    connection.in_atomic_block = True
    return True


@mill.task
def in_transaction() -> bool:
    """Tell whether the connection is inside a transaction before the task used it."""
    return connection.in_atomic_block
