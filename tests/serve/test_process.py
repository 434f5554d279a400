"""`kvlab serve` as a process: it starts with one command, drains on SIGTERM, and its exit code says how that went."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from kvlab import cli
from kvlab.serve.server import bind

ROOT = Path(__file__).parents[2]
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
# A slower engine, so that signals come in the midst of requests on any machine; and one that dies when told.
PRELUDE = """
import os, sys, time
from kvlab.engine.llm_engine import LLMEngine
step = LLMEngine.step
def slow(self):
    time.sleep(0.02)
    if os.path.exists(os.environ["KILL"]):
        raise RuntimeError("told to die")
    return step(self)
LLMEngine.step = slow
from kvlab.cli import main
main()
"""


class Process:
    def __init__(self, folder: Path, *flags: str):
        self.kill_file = folder / "die"
        env = os.environ | {"PYTHONPATH": str(ROOT), "KILL": str(self.kill_file)}
        command = ["serve", "--port", "0", "--num-gpu-blocks-override", "300", *flags]
        self.child = subprocess.Popen([sys.executable, "-c", PRELUDE, *command], cwd=folder, env=env, text=True,
                                      stderr=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        line, self.log = "", ""
        while "http://" not in line:
            line = self.child.stderr.readline()
            assert line, f"it ended with {self.child.wait()}"
            self.log += line
        self.base = line[line.index("http://") :].split()[0]

    def exit_code(self) -> int:
        return self.child.wait(60)


@pytest.fixture
def process(tmp_path):
    made = []

    def start(*flags: str) -> Process:
        made.append(Process(tmp_path, *flags))
        return made[-1]

    yield start
    for each in made:
        each.child.kill()
        each.child.communicate()


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(process):
    served = process()
    assert served.base.startswith("http://127.0.0.1:")
    assert "CPU KV cache size: 4,784 tokens (299 blocks" in served.log and "Maximum concurrency for 2,048" in served.log
    with httpx.stream("POST", f"{served.base}/v1/completions", json=LONG, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        served.child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while httpx.get(f"{served.base}/health").status_code == 200:
            assert time.monotonic() < deadline
        refused = httpx.post(f"{served.base}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]" and '"finish_reason":"length"' in events[-2]
    assert served.exit_code() == 0


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_who_does_not_finish_is_told_and_the_exit_code_says_so(process, how):
    served = process(*(["--drain-timeout", "0.2"] if how == "timeout" else []))
    body = LONG | {"max_tokens": 1500}
    with httpx.stream("POST", f"{served.base}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        served.child.send_signal(signal.SIGTERM)
        if how == "second signal":
            time.sleep(0.3)
            assert served.child.poll() is None
            served.child.send_signal(signal.SIGINT)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]" and "shutting_down" in events[-2]
    assert served.exit_code() == 1


def test_an_idle_server_stops_at_once_with_0(process):
    served = process("--host", "localhost", "--served-model-name", "mine", "--served-model-name", "other")
    models = httpx.get(f"{served.base}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["mine", "other"]
    served.child.send_signal(signal.SIGINT)
    assert served.exit_code() == 0


def test_after_the_engines_death_it_answers_503_and_ends_with_1(process):
    served = process()
    served.kill_file.touch()
    response = httpx.post(f"{served.base}/v1/completions", json=LONG | {"stream": False}, timeout=60)
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
    assert httpx.get(f"{served.base}/health").status_code == 503
    served.child.send_signal(signal.SIGTERM)
    assert served.exit_code() == 1
    assert "told to die" in served.child.stderr.read()  # the log has what clients are not shown


def test_a_port_in_use_is_one_line_before_the_model_is_loaded(monkeypatch, capsys):
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = str(sock.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["kvlab", "serve", "--port", port, "--model", "no model"])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert stopped.value.code == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_flags_reach_the_engine_and_the_server(monkeypatch):
    import kvlab
    from kvlab.serve import server

    seen = {}
    monkeypatch.setattr(server, "serve", lambda args, make_llm: seen.update(args=args, options=make_llm("r")) or 0)
    monkeypatch.setitem(vars(kvlab), "LLMEngine", lambda model, **options: (model, options))
    monkeypatch.setenv("KVLAB_API_KEY", "from-env")
    flags = "--host 0.0.0.0 --port 1 --max-waiting 9 --drain-timeout 3 --max-model-len 64 --max-num-seqs 5"
    flags += " --swap-space 0.5 --max-num-batched-tokens 99 --gpu-memory-utilization 0.5 --block-size 4 --seed 3"
    flags += " --dtype float32 --no-enable-prefix-caching --enable-chunked-prefill --device cpu"
    flags += " --long-prefill-token-threshold 8 --attention-backend torch"
    monkeypatch.setattr(sys, "argv", ["kvlab", "serve", "some/folder", *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    args, (model, options) = seen["args"], seen["options"]
    assert (args.host, args.port, args.max_waiting, args.drain_timeout) == ("0.0.0.0", 1, 9, 3)
    assert args.api_key == ("from-env",) and args.served_model_name == ("some/folder",)
    assert model == "some/folder" and options.pop("recorder") == "r"
    assert options == {"max_model_len": 64, "max_num_seqs": 5, "swap_space": 0.5, "max_num_batched_tokens": 99,
                       "gpu_memory_utilization": 0.5, "block_size": 4, "seed": 3, "dtype": "float32",
                       "enable_prefix_caching": False, "enable_chunked_prefill": True,
                       "long_prefill_token_threshold": 8, "device": "cpu", "attention_backend": "torch"}  # fmt: skip


def test_a_folder_is_served_under_its_own_name(monkeypatch, tmp_path):
    from kvlab.serve import server

    seen = {}
    monkeypatch.setattr(server, "serve", lambda args, make_llm: seen.update(args=args) or 0)
    (tmp_path / "my-model").mkdir()
    monkeypatch.setattr(sys, "argv", ["kvlab", "serve", str(tmp_path / "my-model")])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen["args"].served_model_name == ("my-model",)


def test_two_models_are_one_too_many(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvlab", "serve", "tiny", "--model", "other"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and "given twice" in capsys.readouterr().err
