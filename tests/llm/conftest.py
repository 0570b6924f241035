"""One LLM of the default model for the tests of this folder that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from open_descriptors import descriptors
from server_process import wait_for_end

from ringserve import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    before = descriptors()
    engine = LLM(dtype="float32", max_model_len=512, threads=1, max_num_seqs=8, show_progress=False)
    pids = list(engine.pids().values())
    assert len(pids) == 3
    yield engine
    engine.close()
    engine.close()
    assert engine.pids() == {}
    assert wait_for_end(pids) == []
    assert descriptors() <= before
