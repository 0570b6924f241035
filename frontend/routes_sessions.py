"""GET /v1/sessions and DELETE /v1/sessions/{id}: what is kept of conversations, for those whose they are."""

from __future__ import annotations

from starlette.requests import Request

from ringserve.frontend.context import exchange_of
from ringserve.frontend.errors import ApiError, invalid, shortened
from ringserve.frontend.json_response import JsonResponse
from ringserve.frontend.protocol import GenerationBody
from ringserve.frontend.routes_tokens import unless_gone
from ringserve.frontend.service import Service
from ringserve.frontend.validation import bounded_name
from ringserve.messages.sessions import SessionInfo, SessionRef

MAX_ID_CHARACTERS = 256


def session_ref(body: GenerationBody, request: Request) -> SessionRef | None:
    """The session that a request is a turn of; raises 400."""
    session_id = body.session_id
    if session_id is None:
        return None
    if not 1 <= len(session_id) <= MAX_ID_CHARACTERS:
        raise invalid(f"session_id must have 1 to {MAX_ID_CHARACTERS} characters, got {len(session_id)}.", "session_id")
    return SessionRef(_owner(request), session_id)


class SessionRoutes:
    """The two endpoints about sessions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> JsonResponse:
        found = await unless_gone(request, self._service.dispatcher.list_sessions(_owner(request)))
        return JsonResponse({"object": "list", "data": [_shown(each) for each in found]})

    async def drop(self, request: Request) -> JsonResponse:
        session_id: str = request.path_params["session"]
        question = self._service.dispatcher.drop_session(SessionRef(_owner(request), session_id))
        if not await unless_gone(request, question):
            raise ApiError(
                404, f"There is no session `{shortened(session_id)}`.", param="session_id", code="session_not_found"
            )
        return JsonResponse({"id": session_id, "object": "session.deleted", "deleted": True})


def _owner(request: Request) -> str:
    """Whose sessions a request may see: the key's where there are several, else the header's. Not ``user``: it is part
    of a body, and anybody's to choose."""
    return bounded_name(exchange_of(request.scope).tenant or "")


def _shown(session: SessionInfo) -> dict[str, object]:
    return {
        "id": session.session_id,
        "object": "session",
        "tokens": session.num_tokens,
        "pages": session.num_pages,
        "age": round(session.age_ns * 1e-9, 3),
        "idle": round(session.idle_ns * 1e-9, 3),
        "expires_in": round(session.expires_in_ns * 1e-9, 3),
    }
