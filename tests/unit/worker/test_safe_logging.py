"""Log lines of a worker process name the code that wrote them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tidemill.worker.safe_logging import SafeLog

LOG = SafeLog("tidemill.test")
CALLS: dict[str, Callable[[], None]] = {
    "log": lambda: LOG.log(logging.WARNING, "%s", "a line"),
    "debug": lambda: LOG.debug("%s", "a line"),
    "info": lambda: LOG.info("%s", "a line"),
    "warning": lambda: LOG.warning("%s", "a line"),
    "error": lambda: LOG.error("%s", "a line"),
    "exception": lambda: LOG.exception("%s", "a line"),
    "failure": lambda: LOG.failure(logging.WARNING, "%s", "a line"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_record_has_the_file_and_the_line_of_the_caller(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.DEBUG, "tidemill.test")
    CALLS[name]()
    (record,) = caplog.records
    line = CALLS[name].__code__.co_firstlineno
    assert (record.message, record.pathname, record.lineno) == ("a line", __file__, line)
    assert record.funcName == "<lambda>"
