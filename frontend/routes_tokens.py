"""POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ringserve.frontend import validation
from ringserve.frontend.chat import chat_prompt
from ringserve.frontend.errors import ClientGone, invalid
from ringserve.frontend.json_response import JsonResponse
from ringserve.frontend.parsing import read_struct
from ringserve.frontend.protocol import DetokenizeBody, TokenizeBody
from ringserve.frontend.service import Service
from ringserve.messages.columns import unpack_i32
from ringserve.messages.prompts import Prompt, TextPrompt
from ringserve.messages.tokenization import TokenizeResult

T = TypeVar("T")

_PIECE = 65_536
"""Token ids that are looked at in one turn of the loop, about 2 ms: streams go on between them."""


class TokenRoutes:
    """The two endpoints that only ask the tokenizer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        limits = service.limits()
        body = await read_struct(request, service.max_body_size, TokenizeBody)
        validation.check_model(body.model, limits.model_name)
        question = service.dispatcher.tokenize(_prompt(body), bool(body.return_token_strs))
        result = await unless_gone(request, question)
        return await _tokenized(result, limits.ready.max_model_len)

    async def detokenize(self, request: Request) -> JsonResponse:
        service = self._service
        limits = service.limits()
        body = await read_struct(request, service.max_body_size, DetokenizeBody)
        validation.check_model(body.model, limits.model_name)
        ids = bytearray()
        for start in range(0, len(body.tokens), _PIECE):
            ids += validation.token_ids(body.tokens[start : start + _PIECE], limits.ready.vocab_size, "tokens")
            await asyncio.sleep(0)
        result = await unless_gone(request, service.dispatcher.detokenize(bytes(ids)))
        return JsonResponse({"prompt": result.text})


async def _tokenized(result: TokenizeResult, max_model_len: int) -> Response:
    """The answer, its JSON written piece by piece."""
    ids = unpack_i32(result.token_ids)
    data = bytearray(b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), max_model_len))
    for start in range(0, len(ids), _PIECE):
        data += b"," if start else b""
        data += msgspec.json.encode(ids[start : start + _PIECE].tolist())[1:-1]
        await asyncio.sleep(0)
    data += b'],"token_strs":' + msgspec.json.encode(result.token_strings) + b"}"
    return Response(bytes(data), media_type="application/json")


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either prompt or messages.", "prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise invalid(
                "add_special_tokens is not supported with messages: the template adds them.", "add_special_tokens"
            )
        return chat_prompt(body)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name):
            raise invalid(f"{name} is only allowed with messages.", name)
    return TextPrompt(body.prompt or "", body.add_special_tokens is not False)


async def unless_gone(request: Request, question: Coroutine[Any, Any, T]) -> T:
    """The question's answer; raises ClientGone as soon as the client is, so that nothing waits for nobody."""
    loop = asyncio.get_running_loop()
    asking = loop.create_task(question)
    watch = loop.create_task(_disconnected(request))
    try:
        await asyncio.wait((asking, watch), return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        raise ClientGone
    finally:
        asking.cancel()
        watch.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
