"""Flags, configuration files and the reference come from one declaration."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ringserve.config import ServeConfig
from ringserve.options import OptionError, add_arguments, build_config, options, parse_size, read_file, reference


def test_nothing_given_is_the_declared_default() -> None:
    assert build_config({}) == ServeConfig()


def test_values_from_the_command_line_are_text() -> None:
    config = build_config({"max_num_seqs": "8", "kv_cache_memory": "2G", "api_key": ["a", "b"], "dtype": "float32"})
    assert config.scheduler.max_num_seqs == 8
    assert config.executor.kv_cache_memory == 2 * 1024**3
    assert config.frontend.api_key == ("a", "b")
    assert config.model.dtype == "float32"


def test_values_from_a_file_have_types(tmp_path: Path) -> None:
    file = tmp_path / "ringserve.toml"
    file.write_text('max_num_seqs = 8\nkv_cache_memory = "512M"\napi_key = "one"\ndebug_endpoints = true\n')
    config = build_config(read_file(str(file)))
    assert config.scheduler.max_num_seqs == 8
    assert config.executor.kv_cache_memory == 512 * 1024**2
    assert config.frontend.api_key == ("one",)
    assert config.frontend.debug_endpoints


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": "99999"}, "--port: '99999'"),
        ({"port": "many"}, "--port: 'many'"),
        ({"max_model_len": "0"}, "--max-model-len: '0'"),
        ({"max_num_seqs": "-1"}, "--max-num-seqs: '-1'"),
        ({"dtype": "fp8"}, "not one of auto, float32, bfloat16"),
        ({"block_size": "12"}, "--block-size: 12 is not a power of two"),
        ({"block_size": "256"}, "--block-size: 256 is not a power of two"),
        ({"ring_capacity": "100000"}, "--ring-capacity: 100000 is not a power of two"),
        ({"ring_capacity": "1K"}, "--ring-capacity"),
        ({"kv_cache_memory": "lots"}, "'lots' is not a size such as"),
        ({"kv_cache_memory": "-1G"}, "--kv-cache-memory"),
        ({"swap_space": "-1"}, "--swap-space"),
        ({"swap_space": "much"}, "'much' is not a size such as"),
        ({"api_key": [""]}, "--api-key"),
        ({"host": ""}, "--host: an address to listen on is missing"),
        ({"host": " "}, "--host: an address to listen on is missing"),
        ({"revision": "main"}, "--revision: needs a hub MODEL"),
        ({"chat_template": "/nowhere/template.jinja"}, "--chat-template: /nowhere/template.jinja: no such file"),
        ({"shutdown_timeout": "-1"}, "--shutdown-timeout"),
        ({"max_num_seqs": True}, "--max-num-seqs"),
        ({"scheduling_policy": "lifo"}, "not one of fcfs, priority, deadline, fair"),
        ({"overload_status": "500"}, "--overload-status: 500 is neither 503 nor 429"),
        ({"target_itl_ms": "-1"}, "--target-itl-ms"),
        ({"max_model_len": "1"}, "--max-model-len: 1 leaves no room for a prompt and an answer; set at least 2"),
        ({"max_model_len": 1}, "--max-model-len: 1 leaves no room for a prompt and an answer; set at least 2"),
        ({"queue_timeout": "1e-9"}, "--queue-timeout: 1e-09 seconds are too few; set at least 0.001, or 0"),
        ({"sse_keep_alive_interval": "0.01"}, "--sse-keep-alive-interval: 0.01 seconds are too few; set at least 0.1"),
        ({"tenant_weights": "a=0"}, "--tenant-weights: 'a=0' is not of the form TENANT=WEIGHT"),
    ],
)
def test_a_mistake_names_the_flag(values: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        build_config(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_least_values_are_taken() -> None:
    least = {
        "max_model_len": "2",
        "queue_timeout": "0.001",
        "sse_keep_alive_interval": "0.1",
        "max_num_seqs": "1",
        "max_num_batched_tokens": "1",
        "max_num_queued_reqs": "0",
        "max_num_queued_tokens": "1",
        "max_num_queued_per_tenant": "1",
    }
    build_config(dict(least))
    build_config({"queue_timeout": "0", "sse_keep_alive_interval": "0"})


def test_no_number_may_be_negative_or_none() -> None:
    numbers = [option for option in options() if option.type in (int, float) and not option.repeated]
    assert len(numbers) > 25
    for option in numbers:
        for value in ("-1", "nan", "inf"):
            with pytest.raises(OptionError, match=option.flag):
                build_config({option.name: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seq = 8", "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("zebra = 8", "unknown key 'zebra'"),
        ("max_num_seqs = ", "not TOML"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(OptionError) as caught:
        read_file(str(file))
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(OptionError, match="/nowhere: No such file"):
        read_file("/nowhere")


@pytest.mark.parametrize(
    ("text", "size"), [("4G", 4 << 30), ("512m", 512 << 20), ("1.5K", 1536), ("7", 7), ("2GiB", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_names_are_unique_and_every_option_has_help() -> None:
    names = [option.name for option in options()]
    assert len(names) == len(set(names))
    assert all(option.help.endswith(".") for option in options())


def test_the_written_reference_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert reference() in written, "run: python -m ringserve.options > docs/configuration.md"


def test_help_calls_seconds_what_is_seconds() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    timed = {action.dest: action.metavar == "SECONDS" for action in parser._actions}
    floats = [option for option in options() if option.type is float]
    assert len(floats) > 8
    for option in floats:
        assert timed[option.name] == ("econds" in option.help), option.flag
