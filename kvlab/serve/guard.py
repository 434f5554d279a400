"""Before the routes: who may come in, and with how large a body. Plain ASGI, so that bodies and streams pass untouched.

    request -> key? (401) -> size? (413) -> the app
"""

from hashlib import sha256
from hmac import compare_digest
from typing import Any

from starlette.exceptions import HTTPException

from kvlab.serve.errors import APIError

OPEN_PATHS = ("/health", "/metrics")  # what probes and Prometheus read; neither shows a prompt or an answer


class Guard:
    """Wraps an ASGI app. api_keys: one of them must come as "Authorization: Bearer KEY"; () lets everybody in."""

    def __init__(self, app: Any, api_keys: tuple[str, ...], max_body_bytes: int):
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = None
        if self._digests and scope["path"] not in OPEN_PATHS and not self._knows(headers.get(b"authorization", b"")):
            error = APIError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                             code="invalid_api_key")  # fmt: skip
            error.headers["WWW-Authenticate"] = "Bearer"
        elif int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            error = APIError(413, self._too_large())
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _knows(self, authorization: bytes) -> bool:
        """Compares digests with all keys, so that the time taken tells nothing about any of them."""
        scheme, _, key = authorization.partition(b" ")
        digest = sha256(key.strip()).digest()
        found = [compare_digest(digest, known) for known in self._digests]
        return any(found) and scheme.lower() == b"bearer"

    def _counted(self, receive: Any) -> Any:
        """`receive`, for bodies that do not say how long they are."""
        num_bytes = 0

        async def counted() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body has more than {self._max_body_bytes} bytes, which is what this server reads"
