"""Log records as JSON: every record is one line, whatever it holds."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
from typing import Any

import pytest

from tidemill.core.log_output import JsonFormatter


def line_of(**given: Any) -> dict[str, Any]:
    """The fields of a record with these attributes."""
    record = logging.makeLogRecord({"name": "shop", "levelname": "INFO", "msg": "hello", **given})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record_has_time_level_logger_message_and_pid() -> None:
    line = line_of(created=1_700_000_000.25, msg="%d of %d", args=(1, 2), process=17)
    moment = dt.datetime.fromisoformat(line.pop("time"))
    assert (moment.timestamp(), moment.utcoffset() is not None) == (1_700_000_000.25, True)
    assert line == {"level": "INFO", "logger": "shop", "message": "1 of 2", "pid": 17}


def test_a_record_outside_of_jobs_has_no_fields_of_a_job() -> None:
    assert "job_id" not in line_of(tidemill_job_id="", tidemill_attempt="")
    line = line_of(tidemill_job_id="a", tidemill_task="t", tidemill_queue="q", tidemill_attempt=2)
    assert (line["job_id"], line["task"], line["queue"], line["attempt"]) == ("a", "t", "q", 2)


@pytest.mark.parametrize(
    ("extra", "value"), [({"a": 1}, 1), ({"a": [None, {"b": 1.5}]}, [None, {"b": 1.5}])]
)
def test_an_extra_is_a_field(extra: dict[str, Any], value: Any) -> None:
    assert line_of(**extra)["a"] == value


@pytest.mark.parametrize("value", [object(), "\udcff", {(1, 2): 3}])
def test_an_extra_that_json_cannot_hold_is_left_out(value: Any) -> None:
    assert "a" not in line_of(a=value)


def test_an_extra_does_not_replace_another_field() -> None:
    line = line_of(time="noon", level=9, queue="mine")
    assert (line["time_"], line["level_"], line["queue_"]) == ("noon", 9, "mine")
    assert line["level"] == "INFO"


def test_a_lone_surrogate_in_the_message_loses_no_line() -> None:
    assert line_of(msg="caf\udce9")["message"] == "caf\\udce9"


def test_an_exception_is_text() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        raised = sys.exc_info()
    assert line_of(exc_info=raised)["exception"].endswith("ValueError: bad")
    # and a text that is there is taken as it is
    assert line_of(exc_info=raised, exc_text="short")["exception"] == "short"
    assert line_of(stack_info="File x")["stack"] == "File x"
