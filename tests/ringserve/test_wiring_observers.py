"""Who may look at the rings, and who may spin."""

from __future__ import annotations

import multiprocessing
import os

import msgspec
import pytest

from ringserve.config import ModelSource, ServeConfig, TransportConfig
from ringserve.shm import DoorbellObserverEnd, RingObserverEnd
from ringserve.wiring import Wiring, roles

SOURCE = ModelSource("/nowhere", "directory", "m")


def test_the_frontend_observes_everything_and_nobody_else_anything() -> None:
    config = ServeConfig()
    wiring = Wiring(config)
    reader, writer = multiprocessing.Pipe(duplex=False)
    for role in roles(config, SOURCE):
        spec = wiring.spec(role, writer, "info")
        assert spec.spin_us == 0
        if role.name != "frontend-0":
            assert spec.observers == ()
            continue
        rings = {end.name for end in spec.observers if isinstance(end, RingObserverEnd)}
        doorbells = {end.name for end in spec.observers if isinstance(end, DoorbellObserverEnd)}
        assert rings == {
            "frontend-0>tokenizer-0",
            "tokenizer-0>frontend-0",
            "tokenizer-0>scheduler",
            "scheduler>tokenizer-0",
            "scheduler>executor",
            "executor>scheduler",
        }
        assert doorbells == {"frontend-0", "tokenizer-0", "scheduler", "executor"}
        for end in spec.observers:
            end.close()
    wiring.close()
    reader.close()
    writer.close()


@pytest.mark.parametrize(("cpus", "spin_us"), [(4, 15), (3, 0)])
def test_spin_is_for_free_cores(monkeypatch: pytest.MonkeyPatch, cpus: int, spin_us: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    config = msgspec.structs.replace(ServeConfig(), transport=TransportConfig(ring_spin_us=15, transport="socket"))
    wiring = Wiring(config)
    reader, writer = multiprocessing.Pipe(duplex=False)
    for role in roles(config, SOURCE):
        spec = wiring.spec(role, writer, "info")
        assert spec.spin_us == spin_us
        for end in spec.observers:
            assert isinstance(end, DoorbellObserverEnd), "sockets have no page"
            end.close()
    wiring.close()
    reader.close()
    writer.close()
