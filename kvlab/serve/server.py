"""From settings to a running server, and from a signal to an exit code.

    bind -> load the model -> listen -> SIGTERM or Ctrl-C: new requests 503, those in flight finish -> exit 0
                                        again, or drain_timeout: those in flight end with an error  -> exit 1
                                        the engine thread died: everything 503 until a signal       -> exit 1
"""

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import uvicorn

from kvlab.events import Recorder
from kvlab.serve.app import make_app
from kvlab.serve.args import ServerArgs
from kvlab.serve.desk import Desk
from kvlab.serve.errors import draining


def serve(args: ServerArgs, make_llm: Callable[[Recorder], Any]) -> int:
    """Serve until told to stop; the exit code. ValueError if the address cannot be had.

    make_llm: makes the LLMEngine with this recorder. It is called after the port is taken: a busy port is known at
    once, not after the model has been loaded.
    """
    sock = bind(args.host, args.port)
    try:
        recorder = Recorder()
        server = Server(make_app(make_llm(recorder), args, recorder), args)
        server.run(sockets=[sock])
        return server.exit_code if server.started else 1
    finally:
        sock.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening place. ValueError says what is wrong with the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # there it would let two servers have one port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        why = f"cannot listen on {host} port {port} ({error.strerror})"
        raise ValueError(f"{why}: use another --host or --port") from None
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which keeps answering (503) while it drains, and whose exit code says how that went."""

    def __init__(self, app: Any, args: ServerArgs):
        super().__init__(uvicorn.Config(app, log_level=args.uvicorn_log_level, access_log=args.uvicorn_log_level
                                        in ("info", "debug", "trace"), timeout_graceful_shutdown=5,
                                        server_header=False))  # fmt: skip
        self._desk: Desk = app.state.desk
        self._name, self._timeout = args.served_model_name[0], args.drain_timeout
        self._drain: asyncio.Task | None = None
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:  # from here on it answers
            self._announce(sockets)

    def _announce(self, sockets: list[socket.socket]) -> None:
        print(f"kvlab serves {self._name} on {_url(sockets[0])} (Ctrl-C stops it)", file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self):
        """SIGTERM and Ctrl-C drain; the second one of either does not wait. (Only the main thread gets any.)"""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        told = lambda *_: loop.call_soon_threadsafe(self.stop)  # noqa: E731
        before = {number: signal.signal(number, told) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Drain, then exit. Called again: exit now."""
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())
        else:
            self._cut_off()
            self.should_exit = True

    async def _drain_and_exit(self) -> None:
        if not await self._desk.drain(self._timeout):
            self._cut_off()
        elif self._desk.is_dead:
            self.exit_code = 1
        self.should_exit = True

    def _cut_off(self) -> None:
        self.exit_code = 1
        self._desk.fail_all(draining())
