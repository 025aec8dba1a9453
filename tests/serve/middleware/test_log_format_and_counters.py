"""How log lines are written."""

from __future__ import annotations

import json
import logging
import sys

from serve.observability import log_format

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_json_line_has_time_level_logger_message_ids_and_an_exception_as_one_field() -> None:
    logger = logging.getLogger("some.logger")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logger.makeRecord("some.logger", logging.ERROR, __file__, 1, "failed: %s", ("x",), sys.exc_info())
    before = log_format.request.set({"request_id": "r1", "trace_id": TRACE, "span_id": "ab"})
    line = log_format.Json().format(record)
    log_format.request.reset(before)
    assert "\n" not in line
    read = json.loads(line)
    assert read["time"].endswith("+00:00")
    assert (read["level"], read["logger"], read["message"]) == ("ERROR", "some.logger", "failed: x")
    assert (read["request_id"], read["trace_id"], read["span_id"]) == ("r1", TRACE, "ab")
    assert read["exception"].startswith("Traceback")
    assert "ValueError: two\nlines" in read["exception"]
    half = logger.makeRecord("some.logger", logging.INFO, __file__, 1, "half a \ud800", (), None)
    assert json.loads(log_format.Json().format(half))["message"] == "half a ?"


def test_a_line_that_a_process_prints_is_one_of_its_log_and_a_childs_stays_as_it_is() -> None:
    line = log_format.as_json('error: it says "no"', "millrace.cycle")
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("ERROR", "millrace.cycle", 'error: it says "no"')
    assert json.loads(log_format.as_json("score took 2 s", "x"))["level"] == "INFO"
    assert log_format.as_json(line, "millrace.schedule") == line
    for torn in (
        '{"time": "now", "level',
        '{"time": "\x1b[2Jnow"}',
        '{"time": "\x9b2Jnow"}',
        '{"time": "now"} and more',
    ):
        found = log_format.as_json(torn, "x")
        assert json.loads(found)["message"] == torn
        assert not set(found) & {"\x1b", "\x9b"}
