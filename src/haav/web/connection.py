"""HTTP connections: uvicorn's, with time limits for what clients send."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closes a connection whose client is too slow with the headers of a request, or with a body that nobody reads.

    uvicorn limits only the time between two requests. The app limits the time of the bodies that it reads.
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
        """As uvicorn's, with the error body of the API. A request that was answered gets no second answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": "this is not a valid HTTP request."}).encode()
            length = str(len(body))
            headers = [("content-type", "application/json"), ("content-length", length), ("connection", "close")]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        in_headers = self.conn.their_state is h11.IDLE
        answered_early = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if not in_headers and not answered_early:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
