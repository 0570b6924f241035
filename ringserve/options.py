"""Command-line flags, configuration-file keys and the written reference, generated from the configuration Structs."""

from __future__ import annotations

import argparse
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from ringserve.config import ServeConfig, parse_tenant_weights

_SUFFIXES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZES = {"kv_cache_memory", "swap_space", "max_body_size", "ring_capacity"}

SHORTEST_SEQUENCE = 2
"""A token of a prompt and one of its answer: a server for less could answer nothing."""
SHORTEST_QUEUE_TIMEOUT = 0.001
"""Seconds. A request needs some time to reach its first step even if the server has nothing else to do."""
SHORTEST_KEEP_ALIVE = 0.1
"""Seconds between comment lines: with less, a stream would consist of them."""


class OptionError(Exception):
    """A mistake in what the user gave; the message is for the user."""


class OneLineParser(argparse.ArgumentParser):
    """argparse, whose mistakes are one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ringserve: error: {message}; see `{self.prog} --help`\n")


@dataclass(frozen=True)
class Option:
    """One field of one group."""

    group: str
    """Field name in ServeConfig."""
    title: str
    """The group's heading."""
    name: str
    help: str
    default: Any
    type: Any
    """The bare Python type: bool, int, float, str."""
    choices: tuple[str, ...]
    repeated: bool
    """May be given several times (a tuple)."""
    optional: bool

    @property
    def flag(self) -> str:
        """As typed on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_size(self) -> bool:
        """Takes K, M, G suffixes."""
        return self.name in _SIZES


def options() -> Iterator[Option]:
    """All options, group by group, in the order of their declaration."""
    for group in msgspec.structs.fields(ServeConfig):
        title = (group.type.__doc__ or group.name).strip()
        hints = typing.get_type_hints(group.type, include_extras=True)
        for field in msgspec.structs.fields(group.type):
            kind, optional, repeated, choices = _unwrap(hints[field.name])
            yield Option(
                group.name,
                title,
                field.name,
                _help(hints[field.name]),
                field.default,
                kind,
                choices,
                repeated,
                optional,
            )


def _help(annotation: Any) -> str:
    for extra in typing.get_args(annotation)[1:]:
        if isinstance(extra, msgspec.Meta) and extra.description:
            return extra.description
    raise TypeError(f"{annotation} has no description")


def _unwrap(annotation: Any) -> tuple[Any, bool, bool, tuple[str, ...]]:
    """(type, optional, repeated, choices) of an annotation."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _unwrap(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        (inner,) = (part for part in typing.get_args(annotation) if part is not type(None))
        kind, _, repeated, choices = _unwrap(inner)
        return kind, True, repeated, choices
    if origin is tuple:
        return typing.get_args(annotation)[0], False, True, ()
    if origin is Literal:
        return str, False, False, typing.get_args(annotation)
    return annotation, False, False, ()


def add_arguments(parser: argparse.ArgumentParser, only: Sequence[str] | None = None) -> None:
    """Add every option to ``parser``, or those of some groups. Absent ones leave nothing in the namespace."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options():
        if option.name == "model" or (only is not None and option.group not in only):
            continue  # the model is the positional argument
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.title)
        add = groups[option.group].add_argument
        text = option.help.replace("%", "%%") + _default_text(option)
        if option.type is bool:
            add(option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            continue
        add(
            option.flag,
            action="append" if option.repeated else "store",
            default=argparse.SUPPRESS,
            choices=option.choices or None,
            metavar=None if option.choices else _metavar(option),
            help=text,
        )


def _default_text(option: Option) -> str:
    if option.default in (None, (), "") or option.type is bool:
        return ""
    default = _format_size(option.default) if option.is_size else option.default
    return f" (default: {default})"


def _metavar(option: Option) -> str:
    if option.name.endswith(("_price", "_share", "_utilization")):
        return "NUMBER"
    if option.name.endswith("_ms"):
        return "MILLISECONDS"
    return "SIZE" if option.is_size else {int: "N", float: "SECONDS"}.get(option.type, "TEXT")


def _format_size(size: int) -> str:
    for suffix, unit in reversed(_SUFFIXES.items()):
        if size and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


def parse_size(text: str) -> int:
    """ "4G" -> 4294967296.

    Raises:
        ValueError: not a number with one of the suffixes K, M, G.
    """
    digits = text.upper().removesuffix("B").removesuffix("I")
    unit = digits[-1:] if digits[-1:] in ("K", "M", "G") else ""
    size = float(digits.removesuffix(unit)) * _SUFFIXES[unit]
    if size == float("inf"):
        raise ValueError(f"{text} is too large")
    return int(size)


def read_file(path: str) -> dict[str, Any]:
    """The keys of a TOML configuration file.

    Raises:
        OptionError: unreadable, not TOML, or an unknown key.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: not TOML: {error}") from error
    known = [option.name for option in options()]
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key.replace("-", "_"), known, 1)
            raise OptionError(
                f"--config {path}: unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
    return values


def build_config(values: Mapping[str, Any]) -> ServeConfig:
    """A configuration from option names and values (text from the command line, TOML's types from a file).

    Raises:
        OptionError: a value is of the wrong type, out of range, or contradicts another.
    """
    groups: dict[str, dict[str, Any]] = {}
    for option in options():
        if option.name in values:
            groups.setdefault(option.group, {})[option.name] = _convert(option, values[option.name])
    config = msgspec.convert(groups, ServeConfig)
    _check(config)
    return config


def _convert(option: Option, value: Any) -> Any:
    label = "MODEL" if option.name == "model" else option.flag
    if option.is_size and isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError:
            raise OptionError(f"{label}: {value!r} is not a size such as 512M or 4G") from None
    if option.choices and value not in option.choices:
        raise OptionError(f"{label}: {value!r} is not one of {', '.join(option.choices)}")
    if option.repeated and isinstance(value, str):
        value = [value]
    group_type = next(f.type for f in msgspec.structs.fields(ServeConfig) if f.name == option.group)
    annotation = typing.get_type_hints(group_type, include_extras=True)[option.name]
    try:
        return msgspec.convert(value, annotation, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        reason = str(error)
        raise OptionError(f"{label}: {value!r} is not valid: {reason[:1].lower()}{reason[1:]}") from None


def _check(config: ServeConfig) -> None:
    block = config.executor.block_size
    if block is not None and (block & (block - 1) or not 8 <= block <= 128):
        raise OptionError(f"--block-size: {block} is not a power of two from 8 to 128")
    if not config.frontend.host.strip():
        raise OptionError("--host: an address to listen on is missing; 0.0.0.0 stands for all of this machine's")
    capacity = config.transport.ring_capacity
    if capacity & (capacity - 1):
        raise OptionError(f"--ring-capacity: {capacity} is not a power of two")
    longest = config.model.max_model_len
    if longest is not None and longest < SHORTEST_SEQUENCE:
        raise OptionError(
            f"--max-model-len: {longest} leaves no room for a prompt and an answer; set at least {SHORTEST_SEQUENCE}, "
            "or leave it out for the model's own length"
        )
    _check_zero_or_at_least("--queue-timeout", config.scheduler.queue_timeout, SHORTEST_QUEUE_TIMEOUT)
    _check_zero_or_at_least("--sse-keep-alive-interval", config.frontend.sse_keep_alive_interval, SHORTEST_KEEP_ALIVE)
    if config.scheduler.overload_status not in (503, 429):
        raise OptionError(f"--overload-status: {config.scheduler.overload_status} is neither 503 nor 429")
    try:
        parse_tenant_weights(config.scheduler.tenant_weights)
    except ValueError as error:
        raise OptionError(f"--tenant-weights: {error}") from None
    for key in config.frontend.api_key:
        if not key or not key.isascii() or any(c.isspace() for c in key):
            raise OptionError("--api-key: a key must be ASCII text without spaces, and not empty")
    if config.model.revision is not None and config.model.model is None:
        raise OptionError("--revision: needs a hub MODEL; the embedded default has no revisions")
    for flag, file in (("--chat-template", config.model.chat_template), ("--tokenizer", config.model.tokenizer)):
        if file is None:
            continue
        try:
            exists = Path(file).exists()
        except OSError as error:  # no permission, or no possible name
            raise OptionError(f"{flag}: {file}: {error.strerror}") from error
        if not exists:
            raise OptionError(f"{flag}: {file}: no such file or directory")


def _check_zero_or_at_least(flag: str, seconds: float, least: float) -> None:
    if 0 < seconds < least:
        raise OptionError(f"{flag}: {seconds:g} seconds are too few; set at least {least:g}, or 0 to do without")


def reference(kinds: Sequence[Option] | None = None) -> str:
    """The option reference as Markdown tables, for ``docs/configuration.md``."""
    lines: list[str] = []
    group = ""
    for option in kinds if kinds is not None else options():
        if option.group != group:
            group = option.group
            lines += ["", f"## {option.title}", "", "| flag | key | default | meaning |", "|---|---|---|---|"]
        flag = "`MODEL`" if option.name == "model" else f"`{option.flag}`"
        default = _format_size(option.default) if option.is_size and option.default else option.default
        shown = "" if default in (None, (), "") else f"`{default}`"
        text = option.help + (f" One of {', '.join(f'`{c}`' for c in option.choices)}." if option.choices else "")
        lines.append(f"| {flag} | `{option.name}` | {shown} | {text} |")
    return "\n".join(lines).strip() + "\n"


_HEAD = """# Configuration

Every option of `ringserve serve`, as a flag and as a key of a TOML file given with `--config FILE`. Flags win over the
file. An unknown option or key is an error. This page is generated:
`python -m ringserve.options > docs/configuration.md`.

"""

if __name__ == "__main__":
    print(_HEAD + reference(), end="")
