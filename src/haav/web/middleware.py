"""Around every answer: security headers, HEAD, and metrics."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from haav.web.metrics import Metrics

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Answers:
    """HEAD is answered as GET, without a body."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if head else scope
        started, status = time.monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            elif head:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self.app(scope, receive, answer)
        finally:
            route = scope.get("route")
            self.metrics.observe(getattr(route, "path", "other"), status, time.monotonic() - started)
