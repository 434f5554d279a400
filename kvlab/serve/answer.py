"""One answer on the wire, from its start in the engine to its last byte or to the client's leaving.

    submit --> started --> events --> JSON, or server-sent events ("data: {...}", at last "data: [DONE]")
       '- http.disconnect at any time: the call is released, and aborted within a step

Whatever happens, `release` is the last word: no request outlives the one that asked for it.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi.responses import JSONResponse, Response

from kvlab.engine.outputs import RequestOutput
from kvlab.serve.call import Call
from kvlab.serve.desk import STARTED, Desk
from kvlab.serve.errors import APIError, request_failed
from kvlab.serve.shape import Shape

GONE = "gone"  # left in a call by its client's disconnecting
DONE = b"data: [DONE]\n\n"


class Answer(Response):
    """The response to a call that has not been submitted yet."""

    def __init__(self, desk: Desk, call: Call, shape: Shape):
        super().__init__()
        self._desk, self._call, self._shape = desk, call, shape

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call = self._call
        try:
            self._desk.submit(call)
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        try:
            async with _watch(call, receive):
                response = await (self._stream(send) if call.stream else self._whole())
                if response is not None:
                    response.headers["X-Request-Id"] = call.name
                    await response(scope, receive, send)
        finally:
            self._desk.release(call)

    async def _whole(self) -> Response | None:
        """The answer in one piece, or an error; None if nobody is there to read it."""
        outputs: list[RequestOutput | None] = [None] * len(self._call.jobs)
        while None in outputs:
            for event in await self._call.take():
                if event is GONE:
                    return None
                if event is STARTED:
                    continue
                if error := _error_in(event):
                    return error.response()
                i, output = event
                outputs[i] = output
        return JSONResponse(self._shape.whole(outputs))

    async def _stream(self, send: Any) -> Response | None:
        """Send events as they come. An error before the first of them is an ordinary response, which is returned."""
        num_left, has_begun = len(self._call.jobs), False
        while num_left:
            body: list[bytes] = []  # all that has come since the last time goes out in one piece
            for event in await self._call.take():
                if event is GONE:
                    return None
                if event is STARTED:
                    await self._begin(send)
                    has_begun = True
                    body += [self._chunk(choice) for choice in self._shape.opening()]
                    continue
                if error := _error_in(event):
                    if not has_begun:
                        return error.response()
                    await _send(send, b"".join([*body, _event(error.body()), DONE]), more=False)
                    return None
                i, part = event
                if isinstance(part, RequestOutput):
                    num_left -= 1
                    self._shape.count(part)
                elif (choice := self._shape.piece(i, part)) is not None:
                    body.append(self._chunk(choice))
            if num_left and body:
                await _send(send, b"".join(body))
        if (usage := self._shape.closing()) is not None:
            body.append(_event(usage))
        await _send(send, b"".join([*body, DONE]), more=False)
        return None

    async def _begin(self, send: Any) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
                   "x-request-id": self._call.name}  # fmt: skip
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _event(self._shape.chunk(choice))


def _error_in(event: Any) -> APIError | None:
    if isinstance(event, APIError):
        return event
    return request_failed() if event[1].error is not None else None


@asynccontextmanager
async def _watch(call: Call, receive: Any) -> AsyncIterator[None]:
    """Leave GONE in the call when its client disconnects."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call.put(GONE)

    watcher = asyncio.create_task(wait())
    try:
        yield
    finally:
        watcher.cancel()


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send(send: Any, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
