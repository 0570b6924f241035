"""Token ids equal transformers'; files that cannot be loaded end in one clear line; nothing imports torch."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import array, gguf, scalar, string
from tokenizer_world import (
    CHAT_TEMPLATE,
    Box,
    byte_fallback_tokenizer,
    default_gguf,
    make_conversations,
    make_texts,
    save_directory,
    settings_for,
)

from ringserve.actor import ActorContext
from ringserve.config import TokenizerSettings
from ringserve.engine.prompt_encoder import PromptEncoder
from ringserve.engine.token_text import TokenText
from ringserve.engine.tokenizer import create
from ringserve.engine.tokenizer_class import choose_class_name, read_class_tables
from ringserve.engine.tokenizer_loader import TokenizerLoadError, load_tokenizer
from ringserve.messages.columns import unpack_i32
from ringserve.messages.prompts import ChatPrompt, TextPrompt
from ringserve.messages.startup import StartFailed

KINDS = ["default", "default's directory", "llama", "unigram", "llama in GGUF"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By kind: our model's path and transformers' own tokenizer of it."""
    from transformers import AutoTokenizer

    gguf = default_gguf()
    loaded: dict[str, tuple[Path, Any]] = {
        "default": (gguf, AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name))
    }
    for kind in ("llama", "unigram"):
        directory = save_directory(byte_fallback_tokenizer(kind), tmp_path_factory.mktemp(kind))
        loaded[kind] = (directory, AutoTokenizer.from_pretrained(str(directory)))
    directory = tmp_path_factory.mktemp("default")
    loaded["default"][1].save_pretrained(str(directory))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    loaded["default's directory"] = (directory, AutoTokenizer.from_pretrained(str(directory)))
    path = llama_gguf(tmp_path_factory.mktemp("gguf"))
    loaded["llama in GGUF"] = (path, AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name))
    return loaded


def llama_gguf(directory: Path) -> Path:
    """A GGUF file without tensors that describes a SentencePiece vocabulary with byte fallback."""
    vocab = byte_fallback_tokenizer("llama").get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = {"<unk>": 2, "<s>": 3, "</s>": 3, "<think>": 4}
    numbers = "block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"
    path = directory / "model.gguf"
    path.write_bytes(
        gguf(
            {
                "general.architecture": text_value("llama"),
                **{f"llama.{name}": scalar("I", 8) for name in numbers},
                "llama.attention.layer_norm_rms_epsilon": scalar("f", 1e-5),
                "tokenizer.ggml.model": text_value("llama"),
                "tokenizer.ggml.tokens": array(8, len(tokens), b"".join(map(string, tokens))),
                "tokenizer.ggml.scores": array(
                    6, len(tokens), struct.pack(f"<{len(tokens)}f", *(-float(i) for i in range(len(tokens))))
                ),
                "tokenizer.ggml.token_type": array(
                    5, len(tokens), struct.pack(f"<{len(tokens)}i", *(types.get(token, 1) for token in tokens))
                ),
                "tokenizer.ggml.bos_token_id": scalar("I", vocab["<s>"]),
                "tokenizer.ggml.eos_token_id": scalar("I", vocab["</s>"]),
                "tokenizer.ggml.unknown_token_id": scalar("I", vocab["<unk>"]),
                "tokenizer.chat_template": text_value(CHAT_TEMPLATE),
            }
        )
    )
    return path


def text_value(text: str) -> bytes:
    return struct.pack("<I", 8) + string(text)


def make_encoder(settings: TokenizerSettings) -> PromptEncoder:
    loaded = load_tokenizer(settings)
    return PromptEncoder(loaded, TokenText(loaded.backend))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_texts_equal_transformers(kind: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, reference = models[kind]
    encoder = make_encoder(settings_for(path))
    for text in make_texts(200):
        for add in (True, False):
            ids = reference.encode(text, add_special_tokens=add)
            assert unpack_i32(encoder.encode(TextPrompt(text, add), None).token_ids).tolist() == ids, text
            assert encoder.decode(ids, add) == reference.decode(ids, skip_special_tokens=add)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_conversations_equal_transformers(kind: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, reference = models[kind]
    encoder = make_encoder(settings_for(path))
    for messages in make_conversations(50):
        last = messages[-1]["role"] == "assistant"
        for prompt in (
            ChatPrompt(messages),
            ChatPrompt(messages, add_generation_prompt=False),
            ChatPrompt(messages, add_generation_prompt=False, continue_final_message=last),
        ):
            try:
                expected = reference.apply_chat_template(
                    messages,
                    add_generation_prompt=prompt.add_generation_prompt,
                    continue_final_message=prompt.continue_final_message,
                    return_dict=False,
                )
            except ValueError:
                continue  # a final message of spaces alone cannot be continued
            assert unpack_i32(encoder.encode(prompt, None).token_ids).tolist() == expected


@pytest.mark.parametrize("kind", KINDS[2:])
def test_a_conversation_has_one_bos(kind: str, models: dict[str, tuple[Path, Any]]) -> None:
    encoder = make_encoder(settings_for(models[kind][0]))
    bos = models[kind][1].bos_token_id
    ids = unpack_i32(encoder.encode(ChatPrompt([{"role": "user", "content": "Hi"}]), None).token_ids).tolist()
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert unpack_i32(encoder.encode(TextPrompt("Hi"), None).token_ids)[0] == bos
    assert unpack_i32(encoder.encode(TextPrompt("Hi", False), None).token_ids)[0] != bos


def test_named_templates_and_options(tmp_path: Path) -> None:
    directory = save_directory(byte_fallback_tokenizer("llama"), tmp_path / "model", None)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "the default"},
    ]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(settings_for(directory)).chat_templates == {"tool_use": "tools", "default": "the default"}
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    assert load_tokenizer(settings_for(directory, chat_template=template)).chat_templates == {"default": "mine"}
    loaded = load_tokenizer(settings_for(default_gguf(), tokenizer=directory))
    assert loaded.backend.get_vocab_size() < 1_000


def test_add_bos_token_follows_the_configuration(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = save_directory(byte_fallback_tokenizer("llama"), tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    for options in ({"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}):
        (directory / "tokenizer_config.json").write_text(json.dumps(config | options))
        expected = AutoTokenizer.from_pretrained(str(directory)).encode("Hello")
        encoder = make_encoder(settings_for(directory))
        assert unpack_i32(encoder.encode(TextPrompt("Hello"), None).token_ids).tolist() == expected


def test_the_class_named_in_the_configuration_is_used(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = save_directory(byte_fallback_tokenizer("llama"), tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    cases = [(name, "llama") for name in ("LlamaTokenizer", "LlamaTokenizerFast", "NoSuchTokenizer")]
    for name, model_type in [*cases, ("LlamaTokenizer", "phi3"), ("LlamaTokenizer", "mistral")]:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        (directory / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
        reference = AutoTokenizer.from_pretrained(str(directory))
        encoder = make_encoder(settings_for(directory))
        for text in make_texts(60):
            ids = unpack_i32(encoder.encode(TextPrompt(text), None).token_ids).tolist()
            assert ids == reference.encode(text), (name, model_type, text)


def test_class_tables_equal_the_libraries() -> None:
    from transformers.models.auto import tokenization_auto

    tables = read_class_tables()
    assert tables.distrusted == tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    for model_type, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items():
        # None: something that this tokenizer needs is not installed. The generic ones replace each other likewise.
        if name is not None and name not in ("MistralCommonBackend", "TokenizersBackend"):
            assert tables.registered[model_type] == name.removesuffix("Fast")


@pytest.mark.parametrize(
    ("model_type", "named", "byte_level", "chosen"),
    [
        ("llama", "LlamaTokenizer", False, "LlamaTokenizer"),
        ("llama", "LlamaTokenizerFast", True, ""),
        ("llama", "PreTrainedTokenizerFast", True, ""),
        ("mistral", "LlamaTokenizer", False, ""),
        ("phi3", "LlamaTokenizer", False, ""),
        ("qwen2", "Qwen2Tokenizer", True, "Qwen2Tokenizer"),
        ("qwen2", "LlamaTokenizer", True, "Qwen2Tokenizer"),
        ("gemma2", "GemmaTokenizer", False, "GemmaTokenizer"),
        ("gemma2", "", False, "GemmaTokenizer"),
        ("", "", False, ""),
    ],
)
def test_choice_of_the_class(model_type: str, named: str, byte_level: bool, chosen: str) -> None:
    assert choose_class_name(model_type, named, byte_level, read_class_tables()) == chosen


def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers import AutoTokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello world, the quick brown fox", "jumps over the lazy dog"] * 50),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    encoder = make_encoder(settings_for(tmp_path))
    for text in make_texts(60):
        ids = unpack_i32(encoder.encode(TextPrompt(text), None).token_ids).tolist()
        assert ids == reference.encode(text)


def broken_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(default_gguf().read_bytes()[:100_000])
    return path


def broken_json(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{")
    return tmp_path


def broken_vocabulary(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": 5}}')
    return tmp_path


def broken_sentencepiece(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return tmp_path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (broken_gguf, ["truncated", "download"]),
        (lambda path: path / "missing.gguf", ["cannot be read"]),
        (lambda path: path / "missing", ["not a directory"]),
        (lambda path: path, ["no tokenizer.json", "--tokenizer"]),
        (broken_json, ["tokenizer"]),
        (broken_vocabulary, ["cannot be loaded", "--tokenizer"]),
        (broken_sentencepiece, ["cannot be loaded", "--tokenizer"]),
    ],
)
def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, make: Any, words: list[str]) -> None:
    with pytest.raises(TokenizerLoadError) as caught:
        load_tokenizer(settings_for(make(tmp_path)))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("content", [None, "{% if"])
def test_a_bad_chat_template_file_ends_the_start(tmp_path: Path, content: str | None) -> None:
    template = tmp_path / "template.jinja"
    if content is not None:
        template.write_text(content)
    reports: list[Any] = []
    context = ActorContext(
        "tokenizer-0",
        settings_for(default_gguf(), chat_template=template),
        {"frontend-0": Box("frontend"), "scheduler": Box("scheduler")},
        reports.append,
        lambda: None,
    )
    with pytest.raises(SystemExit) as caught:
        create(context)
    assert caught.value.code == 1
    (report,) = reports
    assert isinstance(report, StartFailed)
    assert "--chat-template" in report.message
    assert "\n" not in report.message


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """In a fresh process: load both kinds, encode a conversation, stream an answer; then look at the modules."""
    llama = save_directory(byte_fallback_tokenizer("llama"), tmp_path / "llama", CHAT_TEMPLATE)
    named = save_directory(byte_fallback_tokenizer("llama"), tmp_path / "named", CHAT_TEMPLATE)
    config = json.loads((named / "tokenizer_config.json").read_text())
    (named / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizer"}))
    script = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from tokenizer_world import Row, collect, default_gguf, make_world, ready, settings_for, token_outputs
        from ringserve.messages.columns import unpack_i32
        from ringserve.messages.prompts import ChatPrompt
        from ringserve.messages.requests import GenerateRequest, OutputParams
        from ringserve.messages.sampling import SamplingParams
        for path in (default_gguf(), Path({str(llama)!r}), Path({str(named)!r})):
            world = make_world(settings_for(path), ready(vocab_size=60_000))
            prompt = ChatPrompt([{{"role": "user", "content": "Hello 😀"}}])
            world.actor.handle(GenerateRequest(1, prompt, SamplingParams(1), OutputParams(stop=("zz",))), "frontend-0")
            ids = unpack_i32(world.scheduler[0].prompt_token_ids)
            for token in ids:
                world.actor.handle(token_outputs([Row(1, [token])]), "scheduler")
            world.actor.handle(token_outputs([Row(1, finish="length")]), "scheduler")
            assert "Hello 😀" in collect(world.frontend)[1, 0].text
        heavy = {{name.partition(".")[0] for name in sys.modules}} & {{"torch", "cupy", "triton", "starlette"}}
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
