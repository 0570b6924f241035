"""POST /v1/chat/completions and POST /v1/completions: from a body to a plan and the format of its answer."""

from __future__ import annotations

from starlette.requests import Request

from ringserve.frontend import validation
from ringserve.frontend.answers import AnswerFormat, AnswerOptions, ChatFormat, CompletionFormat
from ringserve.frontend.chat import chat_prompt
from ringserve.frontend.context import exchange_of, is_sane_id
from ringserve.frontend.dispatcher import Plan
from ringserve.frontend.errors import invalid
from ringserve.frontend.generation import AnswerHead, Generation
from ringserve.frontend.parsing import read_struct
from ringserve.frontend.protocol import ChatCompletionBody, CompletionBody, GenerationBody
from ringserve.frontend.routes_sessions import session_ref
from ringserve.frontend.service import Service
from ringserve.frontend.targets import service_targets


class GenerateRoutes:
    """The two endpoints that generate."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Generation:
        service = self._service
        limits = service.limits()
        body = await read_struct(request, service.max_body_size, ChatCompletionBody)
        validation.check_model(body.model, limits.model_name)
        logprobs = validation.chat_logprobs(body, limits)
        max_tokens = validation.chat_max_tokens(body)
        plan = Plan(
            prompts=[chat_prompt(body)],
            sampling=validation.sampling_params(
                body, limits, logprobs=logprobs, prompt_logprobs=-1, max_tokens=max_tokens
            ),
            output=validation.output_params(body, limits, echo=False),
            n=validation.choices(body, limits),
            max_tokens=max_tokens,
            priority=validation.priority(body),
            received_ns=exchange_of(request.scope).received_ns,
            cache_salt=validation.cache_salt(body),
            tenant=validation.tenant(body, exchange_of(request.scope).tenant),
            targets=service_targets(body, exchange_of(request.scope).received_ns),
            session=session_ref(body, request),
        )
        options = AnswerOptions(logprobs, token_ids=bool(body.return_token_ids))
        return self._generation(request, body, plan, "chatcmpl", ChatFormat(options))

    async def completion(self, request: Request) -> Generation:
        service = self._service
        limits = service.limits()
        body = await read_struct(request, service.max_body_size, CompletionBody)
        validation.check_model(body.model, limits.model_name)
        logprobs = validation.completion_logprobs(body, limits)
        max_tokens = validation.completion_max_tokens(body)
        n = validation.choices(body, limits, validation.num_prompts(body))
        prompts = validation.completion_prompts(body, limits.ready)
        echo = bool(body.echo)
        plan = Plan(
            prompts=prompts,
            sampling=validation.sampling_params(
                body, limits, logprobs=logprobs, prompt_logprobs=logprobs if echo else -1, max_tokens=max_tokens
            ),
            output=validation.output_params(body, limits, echo=echo),
            n=n,
            max_tokens=max_tokens,
            priority=validation.priority(body),
            received_ns=exchange_of(request.scope).received_ns,
            cache_salt=validation.cache_salt(body),
            tenant=validation.tenant(body, exchange_of(request.scope).tenant),
            targets=service_targets(body, exchange_of(request.scope).received_ns),
            session=session_ref(body, request),
        )
        options = AnswerOptions(logprobs, echo=echo, token_ids=bool(body.return_token_ids))
        return self._generation(request, body, plan, "cmpl", CompletionFormat(options))

    def _generation(
        self, request: Request, body: GenerationBody, plan: Plan, prefix: str, answer_format: AnswerFormat
    ) -> Generation:
        service = self._service
        stream = validation.stream_options(body)
        exchange = exchange_of(request.scope)
        if body.request_id is not None:
            if not is_sane_id(body.request_id):
                raise invalid("request_id must be 1 to 128 letters, digits or any of ._:@=+-", "request_id")
            exchange.request_id = body.request_id
        return Generation(
            service.dispatcher,
            plan,
            AnswerHead.new(prefix, exchange.request_id, service.model_name),
            answer_format,
            stream=bool(body.stream),
            include_usage=bool(stream.include_usage),
            continuous_usage=bool(stream.continuous_usage_stats),
            settings=service.stream_settings,
            on_disconnect=service.metrics.on_disconnect,
        )
