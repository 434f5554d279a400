"""A real server on a free port, in this process, so that tests can look at the engine behind it."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed here")
openai = pytest.importorskip("openai", reason="the openai client is not installed here; make test installs it")

from kvlab import LLM, LLMEngine  # noqa: E402
from kvlab.events import Recorder  # noqa: E402
from kvlab.serve import ServerArgs, make_app  # noqa: E402
from kvlab.serve.server import Server, bind  # noqa: E402


class Running:
    """A server, its engine and clients for it. `slow` makes each step take so many seconds longer."""

    def __init__(self, llm: LLMEngine, recorder: Recorder, **args):
        self.llm, self.recorder, self.slow, self.num_steps = llm, recorder, 0.0, 0
        step = llm.step

        def counted():
            time.sleep(self.slow)
            self.num_steps += 1
            return step()

        llm.step = counted
        sock = bind("127.0.0.1", 0)
        self.base = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.args = ServerArgs(port=0, **args)
        self.app = make_app(llm, self.args, recorder)
        self.desk = self.app.state.desk
        self.server = Server(self.app, self.args)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]}, daemon=True)
        self._thread.start()
        self.wait_until(lambda: self.server.started)
        self.http = httpx.Client(base_url=self.base, timeout=60)

    @staticmethod
    def wait_until(condition, seconds: float = 60) -> None:
        """Until it is true; an AssertionError instead of a test that hangs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it has not happened"
            time.sleep(0.01)

    def openai(self, **options) -> "openai.OpenAI":
        key = options.pop("api_key", "none")
        return openai.OpenAI(base_url=f"{self.base}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def async_openai(self, **options) -> "openai.AsyncOpenAI":
        return openai.AsyncOpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def post(self, path: str, body: object, **options) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return self.http.post(path, content=json.dumps(body), headers=headers, **options)

    def metric(self, name: str, **labels) -> float:
        """The value of a sample, at this moment."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.http.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(label in sample for label in wanted):
                return float(value)
        raise AssertionError(f"no sample of {name}")

    def stats(self) -> dict[str, float]:
        return asyncio.run(asyncio.wait_for(_ask(self.desk, self.llm.stats), 30))

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: not self.stats()["num_running"] + self.stats()["num_waiting"])

    def check_pool(self) -> None:
        """No block is lost, and none is held."""
        asyncio.run(_ask(self.desk, self.llm.engine_core.scheduler.manager.check))
        assert self.stats()["usage"] == 0

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.http.close()


async def _ask(desk, function):
    return await desk.ask(function)


def make_server(model_options: dict | None = None, **args) -> Running:
    recorder = Recorder()
    options = {"num_gpu_blocks_override": 512, "max_num_seqs": 8} | (model_options or {})
    return Running(LLMEngine("tiny", recorder=recorder, **options), recorder, **args)


@pytest.fixture(scope="session")
def shared():
    """One server for all tests that leave it as it was."""
    server = make_server()
    yield server
    server.close()


@pytest.fixture
def server(shared):
    """The shared server; after the test nothing may run, and no block may be missing."""
    shared.slow = 0.0
    yield shared
    shared.slow = 0.0
    shared.wait_until_idle()
    shared.check_pool()


@pytest.fixture
def own_server():
    """Makes servers of a test's own."""
    made: list[SimpleNamespace] = []

    def make(model_options: dict | None = None, **args) -> Running:
        made.append(make_server(model_options, **args))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def offline():
    """The same model without a server: what every answer must equal."""
    return LLM("tiny", num_gpu_blocks_override=512, max_num_seqs=8)
