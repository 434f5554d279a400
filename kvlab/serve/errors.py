"""Errors as OpenAI writes them: {"error": {"message", "type", "param", "code"}}, with the status that clients act on.

A message never holds a path, a trace or an address of the server's: those go to the log.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}

KINDS = {"str", "list[str]", "list[TextPart]"}  # pydantic's names for the members of a union, in the path of an error


class APIError(Exception):
    """What the client is told. param: the field of the request that is to blame. code: for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None):  # fmt: skip
        super().__init__(message)
        message = message.encode(errors="replace").decode()  # it may quote a client that sent half a character
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def draining() -> APIError:
    return APIError(503, "the server is shutting down and takes no new requests", code="shutting_down", retry_after=1)


def engine_dead() -> APIError:
    return APIError(503, "the engine has died; the server's log says why, and it must be started again",
                    code="engine_dead")  # fmt: skip


def request_failed() -> APIError:
    return APIError(500, "the model failed at this request; the server's log says why", code="request_failed")


def _of_validation(error: RequestValidationError) -> APIError:
    """One thing that is wrong with a body, in one line: where, what was given, what it should be."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))  # of a field's several forms, the one meant
    if first["type"] == "json_invalid":
        return bad_request(f"the body is no valid JSON: {first['ctx']['error']}")
    path = [str(part) for part in first["loc"] if part != "body" and str(part) not in KINDS]
    if first["type"] == "value_error":
        blamed = first["ctx"]["error"]  # a FieldError, or a ValueError of SamplingParams that begins with the name
        return bad_request(str(blamed), getattr(blamed, "param", str(blamed).partition(" ")[0]))
    if not path:
        return bad_request("the body must be a JSON object, with the header Content-Type: application/json")
    where = ".".join(path)
    if first["type"] == "missing":
        return bad_request(f"{where} is missing", path[0])
    given = repr(first["input"])
    given = given if len(given) <= 80 else given[:77] + "..."
    return bad_request(f"{where} is {given}: {first['msg']}", path[0])


def add_handlers(app: FastAPI) -> None:
    """Every error that leaves the app has OpenAI's shape, also those of the framework."""

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path[:100]}; see docs/serving.md for what there is"
        response = APIError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> JSONResponse:
        return APIError(500, "an error of the server's own; its log has the details").response()
