"""Tasks that were huey's: the examples of its documentation, as tasks of tidemill."""

from tidemill import Ended, Fail, Limit, Retries, Retry, Skip, this_job
from tidemill.django import mill

ran = []
"""What the tasks have done, in order."""


@mill.task
def count_beans(number):
    """An ordinary task."""
    ran.append(number)
    return f"Counted {number} beans"


def every_five_mins():
    """The function of a periodic task."""
    ran.append("five minutes")


@mill.task(retries=Retries(2, delay=10, factor=1, jitter=False, immediate=0))
def flaky(failures):
    """Fail some times."""
    if this_job().attempt <= failures:
        raise ConnectionError(f"attempt {this_job().attempt}")
    return this_job().attempt


@mill.task(retries=1)
def asks_for_a_retry():
    """Choose the delay of the retry."""
    if this_job().attempt == 1:
        raise Retry(delay=60)
    return "again"


@mill.task(retries=5)
def gives_up():
    """End without a retry."""
    raise Fail("no such bean")


@mill.task(retries=5)
def is_skipped():
    """End as succeeded before its work."""
    raise Skip("no beans today")


@mill.task(key="report")
def report(name):
    """At most one unfinished job."""
    ran.append(name)


@mill.task(limit=Limit("1/m", name="api"))
def call_api(number):
    """A task with a rate."""
    ran.append(number)


@mill.task
def add(a, b):
    """Add."""
    return a + b


@mill.task
def double(a):
    """Take the result of another task."""
    return 2 * a


@mill.task
def total(numbers):
    """Take the results of a group."""
    return sum(numbers)


@mill.task
def note_failure(ended: Ended):
    """The handler of a failure."""
    ran.append(ended.state)


@mill.task
def facts():
    """What a task knows of itself."""
    job = this_job()
    return [job.id, job.attempt, job.task]


def around(call_next, context):
    """Middleware: pre_execute and post_execute."""
    ran.append(f"before {context.task}")
    value = call_next()
    ran.append("after")
    return value
