"""How an LLM begins and ends: scripts, deaths, threads, garbage; nothing is ever left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest
from open_descriptors import descriptors
from server_process import descendants, wait_for_end
from tiny_model import save_tiny_model

from ringserve import LLM, SamplingParams
from ringserve.config import ExecutorConfig, LoggingConfig, ModelConfig, SchedulerConfig, TransportConfig
from ringserve.model_source import ModelNotFound
from ringserve.offline.errors import EngineClosed, EngineDied, EngineStartError
from ringserve.offline.progress_bar import BatchProgress
from ringserve.options import options

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_dead_process_ends_everything(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with LLM(tiny, threads=1, show_progress=False) as llm:
        pids = llm.pids()

        def update(_self: BatchProgress, _finished: int, _prompt_tokens: int, _output_tokens: int) -> None:
            if wait_for_end([pids["executor"]], 0.0):
                os.kill(pids["executor"], signal.SIGKILL)

        monkeypatch.setattr(BatchProgress, "update", update)
        with pytest.raises(EngineDied) as caught:
            llm.generate(["One", "Two"], LONG)
        assert str(caught.value) == f"the executor process (pid {pids['executor']}) was killed by SIGKILL"
        assert wait_for_end(list(pids.values())) == []
        assert descriptors() <= before
        with pytest.raises(EngineDied, match="was killed by SIGKILL"):
            llm.generate("One")
    with pytest.raises(EngineDied):
        llm.tokenize("One")


def test_another_thread_and_the_garbage_collector(tiny: Path) -> None:
    """Made in a thread, closed by another one in the middle of a batch; a second one is only forgotten."""
    before = descriptors()
    made: list[LLM] = []
    failures: list[BaseException] = []
    running = threading.Event()

    def work() -> None:
        llm = LLM(tiny, threads=1, show_progress=False)
        made.append(llm)
        running.set()
        try:
            llm.generate(["One"] * 20, LONG)
        except EngineClosed as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert running.wait(120)
    pids = list(made[0].pids().values())
    made[0].close()
    thread.join()
    assert "closed" in str(failures[0])
    assert wait_for_end(pids) == []
    assert descriptors() <= before
    made.clear()

    forgotten = LLM(tiny, threads=1, show_progress=False)
    assert forgotten.generate("One", SamplingParams(max_tokens=1, temperature=0))[0].finished
    pids = list(forgotten.pids().values())
    del forgotten
    gc.collect()
    assert wait_for_end(pids) == []
    assert descriptors() <= before


def test_close_in_a_signal_handler(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It interrupts the call that it would have to wait for."""
    before = descriptors()
    llm = LLM(tiny, threads=1, show_progress=False)
    pids = list(llm.pids().values())

    def update(_self: BatchProgress, _finished: int, _prompt_tokens: int, _output_tokens: int) -> None:
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(BatchProgress, "update", update)
    handler = signal.signal(signal.SIGUSR1, lambda _number, _frame: llm.close())
    try:
        with pytest.raises(EngineClosed):
            llm.generate("One", LONG)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert wait_for_end(pids) == []
    assert descriptors() <= before


def test_ctrl_c_while_it_starts(tiny: Path) -> None:
    """It goes to all processes of the terminal: one traceback, ours."""
    code = f"import ringserve\nprint('begin', flush=True)\nringserve.LLM({str(tiny)!r}, threads=1)\n"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begin\n"
        while "starting" not in (line := process.stderr.readline()):
            assert line, "it ended before it said that it starts"
        children = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        process.wait(60)
    assert len(children) == 3
    assert wait_for_end(children) == []
    assert process.returncode == -signal.SIGINT
    assert rest.count("Traceback") == 1
    assert rest.rstrip().endswith("KeyboardInterrupt")


def test_a_forked_process_leaves_it_alone(tiny: Path) -> None:
    code = (
        "import os, ringserve\n"
        f"llm = ringserve.LLM({str(tiny)!r}, threads=1, show_progress=False)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        llm.generate('x')\n"
        "    except ringserve.offline.errors.EngineError as error:\n"
        "        print('child:', error, flush=True)\n"
        "else:\n"
        "    os.waitpid(child, 0)\n"
        "    print('parent:', len(llm.generate('x', ringserve.SamplingParams(max_tokens=1))))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "child: an LLM cannot be used in a process that was forked from the one that made it",
        "parent: 1",
    ]


def test_a_script_without_main_guard_that_never_closes(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('begin')\n"
        "from ringserve import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny)!r}, threads=1)\n"
        "print(*llm.pids().values())\n"
        "(output,) = llm.generate('hello', SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))\n"
        "print(len(output.outputs[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    begin, pids, count = done.stdout.splitlines()
    assert (begin, count) == ("begin", "3")
    assert wait_for_end([int(pid) for pid in pids.split()]) == []
    assert "ringserve: loading weights ..." in done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_a_script_under_a_daemon_threads_call(tiny: Path) -> None:
    script = (
        "import threading, time\n"
        "from ringserve import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny)!r}, threads=1, show_progress=False)\n"
        "print(*llm.pids().values())\n"
        "long = SamplingParams(max_tokens=400, ignore_eos=True)\n"
        "threading.Thread(target=lambda: llm.generate(['a'] * 500, long), daemon=True).start()\n"
        "time.sleep(0.3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert wait_for_end([int(pid) for pid in done.stdout.split()]) == []
    assert "OSError" not in done.stderr
    assert "EngineDied" not in done.stderr  # the thread may get to say EngineClosed, or nothing


def test_sigkill_leaves_nothing(tiny: Path) -> None:
    """Typed in on standard input, as in an interactive session."""
    code = (
        "import signal\n"
        "from ringserve import LLM\n"
        f"llm = LLM({str(tiny)!r}, threads=1, show_progress=False)\n"
        "print(*llm.pids().values(), flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(code)
        process.stdin.close()
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
        process.wait()
    assert wait_for_end(pids) == []


def test_what_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    before = descriptors()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineStartError):
        LLM(tmp_path, show_progress=False)
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "nothing")
    assert descriptors() <= before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_model_length": 5}, TypeError, "no option 'max_model_length'; did you mean 'max_model_len'?"),
        ({"port": 5}, TypeError, "no option 'port': it means something to `ringserve serve` only"),
        ({"zebra": 5}, TypeError, "no option 'zebra'$"),
        ({"max_model_len": 0}, ValueError, "^max_model_len: 0 is not valid"),
        ({"dtype": "float16"}, ValueError, "^dtype: 'float16' is not one of"),
        ({"kv_cache_memory": "lots"}, ValueError, "^kv_cache_memory: 'lots' is not a size"),
        ({"block_size": 9}, ValueError, "^block_size: 9 is not a power of two"),
    ],
)
def test_options_are_checked(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(**options)  # type: ignore[arg-type]  # that is the point


def test_every_option_that_means_something_to_the_engine_is_offered() -> None:
    of_serving = {"served_model_name", "scheduling_policy", "priority_aging", "tenant_weights"}
    of_serving |= {"input_token_price", "output_token_price", "max_num_queued_tokens", "max_num_queued_per_tenant"}
    of_serving |= {"queue_timeout", "max_predicted_wait", "overload_status", "default_deadline", "target_itl_ms"}
    of_serving |= {"session_ttl", "session_pool_share"}
    groups = (ModelConfig, ExecutorConfig, SchedulerConfig, TransportConfig, LoggingConfig)
    names = {name for group in groups for name in group.__struct_fields__}
    offered = typing.get_type_hints(LLM.__init__)
    assert names - of_serving <= set(offered)
    for option in options():  # and all of its values
        if option.name in offered and option.choices:
            found = {
                value for part in (offered[option.name], *typing.get_args(offered[option.name])) for value in _of(part)
            }
            assert found == set(option.choices), option.name


def _of(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def test_importing_ringserve_is_cheap() -> None:
    code = "import sys, ringserve; print([n for n in sys.modules if n.startswith('ringserve.') or n == 'msgspec'])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
