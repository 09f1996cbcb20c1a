"""Receivers of the signals of the tasks framework."""

import contextlib


@contextlib.contextmanager
def received(*signals):
    """The (sender, result) of each signal that is sent in the block."""
    seen = []

    def receive(signal, sender, task_result, **kwargs):
        seen.append((sender, task_result.id, task_result.status))

    for signal in signals:
        signal.connect(receive)
    try:
        yield seen
    finally:
        for signal in signals:
            signal.disconnect(receive)
