"""The routes. Each does one thing: say which desk, which jobs, which shape.

    POST /v1/completions, /v1/chat/completions     GET /v1/models, /v1/models/{name}
    GET  /health, /metrics, /debug/trace
"""

import asyncio
import re
import time
import uuid
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

import kvlab
from kvlab.events import Recorder, to_json_lines
from kvlab.serve.answer import Answer
from kvlab.serve.args import ServerArgs
from kvlab.serve.call import Call
from kvlab.serve.chat import ChatShape
from kvlab.serve.completions import CompletionShape
from kvlab.serve.desk import Desk
from kvlab.serve.errors import APIError, add_handlers
from kvlab.serve.guard import Guard
from kvlab.serve.metrics import Metrics
from kvlab.serve.prompts import Prompts
from kvlab.serve.protocol import Body, ChatBody, CompletionBody

CLIENT_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


def make_app(llm: Any, args: ServerArgs, recorder: Recorder | None = None) -> FastAPI:
    """The server of `llm`, which belongs to its engine thread while the app runs. `app.state.desk` is its desk.

    recorder: the llm's, for /debug/trace and queue times.
    """
    names = args.served_model_name
    metrics = Metrics(names[0], llm.config.max_model_len, llm.stats())
    desk = Desk(llm, recorder, metrics, args.max_waiting)
    prompts = Prompts(llm)
    prompts.warm_up()
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        desk.open()
        try:
            yield
        finally:
            await desk.close()
            prompts.pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="kvlab", version=kvlab.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(Guard, api_keys=args.api_key, max_body_bytes=args.max_body_bytes)
    app.state.desk = desk
    add_handlers(app)

    def check_model(name: str | None) -> None:
        if name is not None and name not in names:
            raise APIError(404, f"there is no model {name[:100]!r} here; there is {', '.join(names)}", param="model",
                           code="model_not_found")  # fmt: skip

    async def answer(request: Request, body: Body, prefix: str, shape: type) -> Answer:
        arrival = time.monotonic()
        desk.check_open()
        check_model(body.model)
        jobs = await asyncio.get_running_loop().run_in_executor(prompts.pool, prompts.jobs, body)
        call = Call(prefix + _id_of(request, body), jobs, body.stream, arrival)
        return Answer(desk, call, shape(body, call, body.model or names[0], llm.tokenizer))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await answer(request, body, "cmpl-", CompletionShape)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await answer(request, body, "chatcmpl-", ChatShape)

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "kvlab", "root": names[0],
                "parent": None, "max_model_len": llm.config.max_model_len}  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return card(name)

    @app.get("/health")
    async def health() -> Response:
        if desk.is_healthy and not desk.is_draining:
            return JSONResponse({"status": "ok"})
        status = "shutting down" if desk.is_healthy else "the engine has died"
        return JSONResponse({"status": status}, status_code=503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/debug/trace")
    async def trace(kind: list[str] = Query([]), last: int | None = Query(None, ge=1)) -> Response:  # noqa: B008
        """The recorder's events as JSON lines, oldest first: of these kinds only, the last so many only."""
        if recorder is None:
            raise APIError(404, "this server records no events")
        events = await desk.ask(lambda: recorder.events(*kind))
        lines = await asyncio.to_thread(to_json_lines, events[-last:] if last else events)
        return PlainTextResponse(lines, media_type="application/jsonl")

    return app


def _id_of(request: Request, body: Body) -> str:
    """The client's own id, if it brings one that can be shown; it need not be unique."""
    own = request.headers.get("x-request-id") or body.request_id or ""
    return own if CLIENT_ID.fullmatch(own) else uuid.uuid4().hex
