"""Functions and hooks by their dotted paths, as django-q uses them."""

import time

seen = []


def multiply(a, b=2):
    return a * b


def slow(seconds):
    seen.append("slow")
    time.sleep(seconds)
    return "done"


def fail():
    raise ValueError("no")


def planned(when=None):
    return when


def remember(task):
    seen.append((task.func, task.success, task.result, task.group))


def given(first, *args, order, price):
    return [first.pk, *args, order.pk, price]


def named(args, kwargs):
    return [args, kwargs]


def notes_of(order, other=None):
    return [order.note, other.note]


def around(call_next, context):
    """Middleware."""
    return [context.task, call_next()]
