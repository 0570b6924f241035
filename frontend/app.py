"""The routes, put together."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from ringserve.frontend.edge import ApiKeys, Edge
from ringserve.frontend.errors import ApiError, ClientGone
from ringserve.frontend.json_response import on_api_error, on_client_gone, on_exception, on_http_exception
from ringserve.frontend.routes_generate import GenerateRoutes
from ringserve.frontend.routes_server import ServerRoutes
from ringserve.frontend.routes_sessions import SessionRoutes
from ringserve.frontend.routes_tokens import TokenRoutes
from ringserve.frontend.service import Service


def build_app(service: Service) -> Edge:
    """The ASGI application."""
    generate, tokens, server = GenerateRoutes(service), TokenRoutes(service), ServerRoutes(service)
    sessions = SessionRoutes(service)
    routes = [
        Route("/v1/chat/completions", generate.chat, methods=["POST"]),
        Route("/v1/completions", generate.completion, methods=["POST"]),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/v1/models/{model:path}", server.model, methods=["GET"]),
        Route("/v1/sessions", sessions.list, methods=["GET"]),
        Route("/v1/sessions/{session:path}", sessions.drop, methods=["DELETE"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/ready", server.ready, methods=["GET"]),
        Route("/version", server.version, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
    ]
    if service.settings.config.debug_endpoints:
        routes.append(Route("/debug/integrity", server.integrity, methods=["GET"]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: on_api_error,
            ClientGone: on_client_gone,
            HTTPException: on_http_exception,
            Exception: on_exception,
        },
    )
    app.router.redirect_slashes = False
    return Edge(app, ApiKeys(service.settings.config.api_key))
