"""What each process of the six hops does with a message: pass 64 bytes on, or decode and build the engine's own."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ringserve.messages.columns import pack_i32, pack_u64
from ringserve.messages.prompts import TextPrompt
from ringserve.messages.requests import GenerateRequest, OutputParams, TokenizedRequest
from ringserve.messages.rings import RINGS
from ringserve.messages.sampling import SamplingParams
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput
from ringserve.messages.text_outputs import TextOutputs
from ringserve.messages.token_outputs import TokenOutputs

NAMES = ("frontend", "tokenizer", "scheduler", "executor")
EDGES = tuple(itertools.pairwise(NAMES))
HOPS = 6
BATCH = 32
Content = Literal["engine", "small"]
Handler = Callable[[bytes], tuple[str, bytes]]
"""A message in; the neighbour that gets the next one, and its bytes."""


class Small(msgspec.Struct, array_like=True, tag=True):
    """64 bytes that know how far they are."""

    hop: int
    number: int
    payload: bytes = bytes(40)


def small_handler(name: str) -> Handler:
    """Pass it on."""
    decode, encode = msgspec.msgpack.Decoder(Small).decode, msgspec.msgpack.Encoder().encode
    route = ("tokenizer", "scheduler", "executor", "scheduler", "tokenizer", "frontend")

    def handle(data: bytes) -> tuple[str, bytes]:
        message = decode(data)
        return route[message.hop], encode(Small(message.hop + 1, message.number, message.payload))

    return handle


def engine_handler(name: str) -> Handler:
    """Decode what this process receives, build what it would send."""
    decode = msgspec.msgpack.Decoder(_inbound(name)).decode
    encode = msgspec.msgpack.Encoder().encode
    slots = pack_i32(range(BATCH))
    ones = pack_i32([1] * BATCH)
    zeros = pack_i32([0] * BATCH)
    stats = EngineStats(BATCH, 0, 900, 1000, 0, 0, 1, BATCH)
    now = time.monotonic_ns

    def handle(data: bytes) -> tuple[str, bytes]:
        message = decode(data)
        match message:
            case GenerateRequest():
                ids = pack_i32(range(BATCH))
                return "scheduler", encode(
                    TokenizedRequest(message.request_id, ids, message.sampling, 1, 16, 0, (), message.sent_ns, now())
                )
            case TokenizedRequest():
                step = message.request_id
                return "executor", encode(SchedulerOutput(step, (), slots, ones, zeros, b"", b"", now()))
            case SchedulerOutput():
                received = now()
                tokens = array("i", message.slots).tobytes()
                return "scheduler", encode(
                    ModelRunnerOutput(message.step_id, message.slots, tokens, None, (), received, received, now())
                )
            case ModelRunnerOutput():
                times = StepTimes(message.step_id, now(), message.received_ns, message.started_ns, message.sent_ns)
                ids = pack_u64([message.step_id] * BATCH)
                return "tokenizer", encode(
                    TokenOutputs(ids, zeros, ones, message.token_ids, (), (), None, (), times, stats, now())
                )
            case TokenOutputs():
                received = now()
                texts = (" token",) * BATCH
                return "frontend", encode(
                    TextOutputs(
                        message.request_ids,
                        message.choices,
                        texts,
                        message.token_counts,
                        message.token_ids,
                        (),
                        (),
                        (),
                        message.times,
                        message.stats,
                        message.sent_ns,
                        received,
                        now(),
                    )
                )
        raise TypeError(message)

    return handle


def _inbound(name: str) -> Any:
    unions = [RINGS[source, target] for source, target in RINGS if target == name]
    union = unions[0]
    for other in unions[1:]:
        union |= other
    return union


def first_message(content: Content) -> Callable[[int], bytes]:
    """What the frontend sends for its ``number``-th request."""
    encode = msgspec.msgpack.Encoder().encode
    if content == "small":
        return lambda number: encode(Small(1, number))
    prompt, sampling, output = (
        TextPrompt("Tell me a story about a ring, a doorbell and a pipe."),
        SamplingParams(7),
        OutputParams(),
    )
    return lambda number: encode(GenerateRequest(number, prompt, sampling, output, sent_ns=time.monotonic_ns()))


def handler(content: Content, name: str) -> Handler:
    return small_handler(name) if content == "small" else engine_handler(name)


def without_transport_us(content: Content, count: int) -> float:
    """Processor time of a round trip's encoding, decoding and building alone: every process's work, in this one."""
    first, handlers = first_message(content), {name: handler(content, name) for name in NAMES[1:]}
    decode = last_decoder(content)
    start = time.thread_time()
    for number in range(count):
        target, data = "tokenizer", first(number)
        while target != "frontend":
            target, data = handlers[target](data)
        decode(data)
    return (time.thread_time() - start) * 1e6 / count


def last_decoder(content: Content) -> Callable[[bytes], Any]:
    """The frontend's."""
    return msgspec.msgpack.Decoder(Small if content == "small" else RINGS["tokenizer", "frontend"]).decode
