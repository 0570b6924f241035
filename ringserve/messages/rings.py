"""What travels on which ring: one closed union of messages for each.

    frontend --FrontendMessage--> tokenizer --SchedulerInbound--> scheduler --SchedulerOutput--> executor
    frontend <--FrontendInbound-- tokenizer <--SchedulerMessage-- scheduler <--ExecutorMessage-- executor

Whoever reads a ring decodes its union; bytes of anything else are an error.
"""

from __future__ import annotations

from typing import Any

from ringserve.messages.integrity import CheckIntegrity, IntegrityReport
from ringserve.messages.requests import Abort, GenerateRequest, RequestRefused, TokenizedRequest
from ringserve.messages.sessions import DropSession, ListSessions, SessionDropped, SessionList
from ringserve.messages.startup import ExecutorReady, LoadProgress
from ringserve.messages.steps import ModelRunnerOutput, SchedulerOutput
from ringserve.messages.text_outputs import TextOutputs
from ringserve.messages.token_outputs import TokenOutputs
from ringserve.messages.tokenization import DetokenizeRequest, DetokenizeResult, TokenizeRequest, TokenizeResult

FrontendMessage = (
    GenerateRequest | TokenizeRequest | DetokenizeRequest | Abort | CheckIntegrity | ListSessions | DropSession
)

SchedulerInbound = TokenizedRequest | Abort | CheckIntegrity | ListSessions | DropSession

ExecutorMessage = ExecutorReady | LoadProgress | ModelRunnerOutput

SchedulerMessage = (
    TokenOutputs | RequestRefused | ExecutorReady | LoadProgress | IntegrityReport | SessionList | SessionDropped
)

FrontendInbound = (
    TextOutputs
    | RequestRefused
    | ExecutorReady
    | LoadProgress
    | IntegrityReport
    | SessionList
    | SessionDropped
    | TokenizeResult
    | DetokenizeResult
)

RINGS: dict[tuple[str, str], Any] = {
    ("frontend", "tokenizer"): FrontendMessage,
    ("tokenizer", "scheduler"): SchedulerInbound,
    ("scheduler", "executor"): SchedulerOutput,
    ("executor", "scheduler"): ExecutorMessage,
    ("scheduler", "tokenizer"): SchedulerMessage,
    ("tokenizer", "frontend"): FrontendInbound,
}
"""What travels on the ring from one kind of process to another."""
