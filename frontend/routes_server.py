"""What is asked about the server: models, health, readiness, version, metrics, integrity."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ringserve.frontend.errors import loading, shutting_down
from ringserve.frontend.json_response import JsonResponse
from ringserve.frontend.routes_tokens import unless_gone
from ringserve.frontend.service import Service
from ringserve.frontend.validation import model_not_found


class ServerRoutes:
    """GET endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> JsonResponse:
        return JsonResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> JsonResponse:
        wanted = request.path_params["model"]
        card = self._model_card()
        if wanted != card["id"]:
            raise model_not_found(wanted)
        return JsonResponse(card)

    async def health(self, request: Request) -> JsonResponse:
        """Liveness: this process answers (the supervisor ends the server if another one dies). Shows the start."""
        dispatcher = self._service.dispatcher
        if dispatcher.ready is not None:
            return JsonResponse({"status": "draining" if dispatcher.draining else "ok"})
        progress = dispatcher.progress
        return JsonResponse({"status": "loading", "stage": progress.stage, "progress": round(progress.fraction, 4)})

    async def ready(self, request: Request) -> JsonResponse:
        """Whether a request sent now would be accepted."""
        dispatcher = self._service.dispatcher
        if dispatcher.draining:
            raise shutting_down()
        if dispatcher.ready is None:
            raise loading()
        return JsonResponse({"status": "ready"})

    async def version(self, request: Request) -> JsonResponse:
        return JsonResponse({"version": self._service.settings.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def integrity(self, request: Request) -> JsonResponse:
        """What every process holds; for tests of a live server."""
        dispatcher = self._service.dispatcher
        report = await unless_gone(request, dispatcher.check_integrity())
        statistics = dispatcher.statistics()
        tasks = len(asyncio.all_tasks())
        return JsonResponse(
            {
                "problems": list(report.problems),
                "num_free_pages": report.num_free_pages,
                "num_pages": report.num_pages,
                "num_free_slots": report.num_free_slots,
                "scheduler_requests": report.scheduler_requests,
                "tokenizer_requests": report.tokenizer_requests,
                "frontend_requests": statistics["journal_entries"],
                "frontend": {**statistics, "tasks": tasks},
            }
        )

    def _model_card(self) -> dict[str, Any]:
        service = self._service
        ready = service.dispatcher.require_ready()
        name = service.model_name
        permission = {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": service.created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "ringserve",
            "root": name,
            "parent": None,
            "max_model_len": ready.max_model_len,
            "permission": [permission],
        }
