"""HTTP connections: uvicorn's, with a time limit for the headers of a request."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closes a connection whose request is not complete up to the end of its headers in time.

    uvicorn limits only the time between two requests.
    """

    seconds = 15.0

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, with the error body of the API"""
        body = json.dumps({"error": "this is not a valid HTTP request."}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are complete
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
