"""Parameters that are no field of a body: which of them are harmless, and which would change the answer.

A parameter that asks for something this server does not do is refused by name, never dropped: an answer without the
constraint, tool or adapter that was asked for looks like a right one. Each comes with the values that mean "off";
those are accepted, since client libraries send them unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringserve.frontend.errors import invalid, shortened

_OFF = (None, False)

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    # tools
    "tools": (None,),
    "tool_choice": (None, "none"),
    "functions": (None,),
    "function_call": (None, "none"),
    # constrained output
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "structural_tag": (None,),
    "grammar": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    # sampling
    "prompt_logprobs": (None,),
    "best_of": (None, 1),
    "use_beam_search": _OFF,
    "length_penalty": (None, 1, 1.0),
    "early_stopping": _OFF,
    "logits_processors": (None,),
    "typical_p": (None, 1, 1.0),
    "min_new_tokens": (None,),
    "vllm_xargs": (None,),
    "repetition_detection": (None,),
    "return_tokens_as_token_ids": _OFF,
    "spaces_between_special_tokens": (None, True),
    # prompts
    "suffix": (None,),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "chat_template": (None,),
    "documents": (None,),
    "mm_processor_kwargs": (None,),
    "media_io_kwargs": (None,),
    "kv_transfer_params": (None,),
    # modalities and models
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "lora": (None,),
    "lora_path": (None,),
    "adapter": (None,),
    "adapter_id": (None,),
    "adapters": (None,),
    # reasoning
    "reasoning": (None,),
    "reasoning_effort": (None, "none"),
    "thinking": (None,),
    "thinking_token_budget": (None,),
    "include_reasoning": _OFF,
    "verbosity": (None, "medium"),
    "timeout": (None,),
    "deadline": (None,),
    # of the other endpoint family
    "echo": _OFF,
    "add_special_tokens": _OFF,
    "top_logprobs": (None,),
    "max_completion_tokens": (None,),
}

HARMLESS = frozenset(
    {
        "store",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "moderation",
    }
)
"""They say nothing about the text of the answer."""


def check_names(body: Mapping[str, Any], fields: frozenset[str]) -> None:
    """Refuse what is neither a field, nor harmless, nor switched off."""
    for name, value in body.items():
        if name in fields or name in HARMLESS:
            continue
        off = UNSERVED.get(name)
        if off is None:
            raise invalid(
                f"Unrecognized request argument supplied: {shortened(name)}", shortened(name), "unknown_parameter"
            )
        if name == "tools" and value == []:
            raise invalid("[] is too short - 'tools'", "tools")
        if name == "tool_choice" and value not in off and not body.get("tools"):
            raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
        if not any(value is each or (value == each and type(value) is type(each)) for each in off):
            raise invalid(f"'{name}' is not supported by this server.", name, "unsupported_parameter")
