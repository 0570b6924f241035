"""One line for many preemptions."""

from __future__ import annotations

import logging
import re

import pytest
from scheduler_inputs import executor_ready, make_request
from scheduler_simulation import Engine

from ringserve.engine.pressure_log import INTERVAL_NS, PressureLog


def test_one_line_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(executor_ready(num_pages=12, max_num_seqs=4))
    log = PressureLog()
    caplog.set_level(logging.WARNING)
    for request_id in range(1, 9):
        engine.add(make_request(request_id, 20, 100))
    log.look(engine.scheduler, 1)
    assert caplog.records == []
    while engine.schedule() is not None or engine.deliver():
        log.look(engine.scheduler, 1)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 1
    assert len(caplog.records) == 1
    first = int(caplog.records[0].getMessage().split()[0])
    log.look(engine.scheduler, INTERVAL_NS + 1)
    assert len(caplog.records) == 2
    line = caplog.records[1].getMessage()
    assert line.startswith(f"{stats.num_preemptions - first} preempted")
    lost = [int(re.findall(r"(\d+) tokens computed again", each.getMessage())[0]) for each in caplog.records]
    assert sum(lost) == stats.preempted_tokens
    assert lost[0] > 0
    assert "\n" not in line
    log.look(engine.scheduler, 10 * INTERVAL_NS)
    assert len(caplog.records) == 2


def test_what_came_back_from_the_host_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(executor_ready(num_pages=12, max_num_seqs=4, num_host_pages=6))
    log = PressureLog()
    caplog.set_level(logging.WARNING)
    for request_id in range(1, 9):
        engine.add(make_request(request_id, 20, 100))
    engine.run()
    log.look(engine.scheduler, 1)
    stats = engine.scheduler.stats()
    assert stats.preempted_tokens > 0
    assert stats.swapped_in_tokens > 0
    line = caplog.records[0].getMessage()
    assert f"{stats.preempted_tokens} tokens computed again and {stats.swapped_in_tokens} brought back" in line
    assert "(0 of 6 pages of the swap space in use)" in line
