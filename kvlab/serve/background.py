"""A server on a thread of this process, for a notebook: `kvlab serve`, with the engine in reach (lab 14).

    with serving("tiny", num_gpu_blocks_override=64) as server:      server = serving("tiny")
        server.url                  http://127.0.0.1:PORT            ...
        server.metrics()            {name: value}                    server.stop()
        server.pool()               (held, cached, free) blocks

The port is any free one, so two never clash. The thread ends with the process, and with the last reference to the
server: a cell that is run again leaves nothing behind.
"""

import asyncio
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.engine.llm import LLM
from kvlab.events import Recorder
from kvlab.serve.app import make_app
from kvlab.serve.args import ServerArgs
from kvlab.serve.reading import samples
from kvlab.serve.server import Server, bind


class BackgroundServer:
    """A running server. model: its name in requests. llm: its engine, which belongs to the engine thread."""

    def __init__(self, llm: LLM, args: ServerArgs, recorder: Recorder | None = None):
        self.llm, self.recorder, self.model = llm, recorder, args.served_model_name[0]
        sock = bind(args.host, args.port)
        try:
            app = make_app(llm, args, recorder)
            self._desk = app.state.desk
            server = _Quiet(app, args)
        except BaseException:
            sock.close()
            raise
        self.url = "http://{}:{}".format(*sock.getsockname()[:2])
        thread = threading.Thread(target=_run, args=(server, sock), name="kvlab-server", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _end, server, thread)
        while server.loop is None:
            if not thread.is_alive():
                raise RuntimeError("the server has not come up; its log says why")
            time.sleep(0.01)
        self._loop = server.loop

    def __enter__(self) -> "BackgroundServer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._stop.alive

    def stop(self) -> None:
        """End it, with all requests in flight. Again is harmless."""
        self._stop()

    def get(self, path: str) -> str:
        """The text behind a path, such as "/metrics"."""
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.read().decode()

    def metrics(self) -> dict[str, float]:
        """A scrape of /metrics, as kvlab.serve.reading.samples gives it."""
        return samples(self.get("/metrics"))

    def ask(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine thread, between two steps, and wait for what it returns."""
        if not self.is_running:
            raise RuntimeError("this server has been stopped: make another one")
        return asyncio.run_coroutine_threadsafe(self._desk.ask(function), self._loop).result(60)

    def pool(self) -> tuple[int, int, int]:
        """Blocks that are (held by somebody, cached and held by nobody, free), the null block left out."""
        return self.ask(lambda: _count(self.llm.engine.scheduler.manager.block_pool))

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until nothing runs or waits. TimeoutError after so many seconds."""
        scheduler, end = self.llm.engine.scheduler, time.monotonic() + seconds
        while self.ask(lambda: len(scheduler.running) + len(scheduler.waiting)):
            if time.monotonic() > end:
                raise TimeoutError(f"after {seconds} s requests are still running")
            time.sleep(0.01)


def serving(model: str = "tiny", *, port: int = 0, max_waiting: int | None = None, recorder: Recorder | None = None,
            **options: Any) -> BackgroundServer:  # fmt: skip
    """Serve `model` from a thread of this process; ready when it returns.

    port: 0 is any free one. max_waiting: as in ServerArgs. options: those of kvlab.LLM, `parts` too. ValueError if the
    port is taken or an option is wrong.
    """
    recorder = recorder or Recorder()
    llm = LLM(model, recorder=recorder, **options)
    name = Path(model).resolve().name if Path(model).is_dir() else model
    args = ServerArgs(served_model_name=(name,), port=port, max_waiting=max_waiting)
    return BackgroundServer(llm, args, recorder)


class _Quiet(Server):
    """Says nothing when it is up, since who started it waits for it; keeps its event loop where others find it."""

    loop: asyncio.AbstractEventLoop | None = None

    def exit_now(self) -> None:
        self._cut_off()  # or whoever still listens would be waited for
        self.should_exit = True

    def _announce(self, sockets: Any) -> None:
        self.loop = asyncio.get_running_loop()


def _run(server: Server, sock: Any) -> None:
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()


def _end(server: Server, thread: threading.Thread) -> None:
    if thread.is_alive():
        server.loop.call_soon_threadsafe(server.exit_now)
        thread.join(30)


def _count(pool: Any) -> tuple[int, int, int]:
    blocks = pool.blocks[1:]
    held = sum(block.ref_cnt > 0 for block in blocks)
    cached = sum(block.ref_cnt == 0 and block.block_hash is not None for block in blocks)
    return held, cached, len(blocks) - held - cached
