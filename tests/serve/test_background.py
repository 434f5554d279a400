"""The server on a thread: up when made, out of the way when stopped, and nothing left behind."""

import subprocess
import sys
import threading
import time

import httpx
import pytest

from kvlab.serve import serving

ASK = {"model": "tiny", "prompt": "Why", "temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server():
    with serving("tiny", num_gpu_blocks_override=64, max_num_seqs=4) as server:
        yield server


def threads():
    return [thread for thread in threading.enumerate() if thread.name in ("kvlab-server", "kvlab-engine")]


def test_it_serves_and_counts(server):
    assert server.get("/health") == '{"status":"ok"}'
    held, cached, free = server.pool()
    assert held + cached + free == 63
    before = server.metrics()
    answer = httpx.post(f"{server.url}/v1/completions", json=ASK | {"stream": False, "max_tokens": 40})
    assert answer.json()["usage"]["completion_tokens"] == 40
    server.wait_until_idle()
    after = server.metrics()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 40
    assert server.pool()[0] == 0 < server.pool()[1]


def test_held_blocks_are_seen_while_they_are_held(server):
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ASK) as response:
        pieces = response.iter_bytes()
        next(pieces), next(pieces)  # the first goes out before the first step
        assert server.pool()[0] > 0
    server.wait_until_idle()
    assert server.pool()[0] == 0


def test_two_do_not_clash_and_a_new_one_in_its_place_ends_the_old_one(server):
    num_before = len(threads())
    other = serving("tiny", num_gpu_blocks_override=16)
    first = other.url
    assert first != server.url and len(threads()) == num_before + 2
    other = serving("tiny", num_gpu_blocks_override=16)
    assert other.url != first and len(threads()) == num_before + 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first}/health")
    other.stop()
    other.stop()
    assert not other.is_running and len(threads()) == num_before
    with pytest.raises(RuntimeError, match="make another one"):
        other.pool()


def test_stopping_amid_a_stream_ends_the_stream():
    before = threads()
    server, pieces = serving("tiny", num_gpu_blocks_override=64), []
    server.llm.step = slow(server.llm.step)
    reader = threading.Thread(target=read, args=(server.url, pieces))
    reader.start()
    while not pieces:
        time.sleep(0.01)
    server.stop()
    reader.join(30)
    assert not reader.is_alive() and threads() == before
    assert b"shutting_down" in b"".join(pieces)


def slow(step):
    def slowly():
        time.sleep(0.01)
        return step()

    return slowly


def read(url, pieces):
    with httpx.stream("POST", f"{url}/v1/completions", json=ASK) as response:
        pieces.extend(response.iter_bytes())


def test_a_port_that_is_taken_is_refused(server):
    with pytest.raises(ValueError, match="cannot listen on 127.0.0.1 port"):
        serving("tiny", port=int(server.url.rpartition(":")[2]), num_gpu_blocks_override=16)


def test_a_process_that_ends_takes_it_along_without_a_word():
    code = "from kvlab.serve import serving; s = serving('tiny', num_gpu_blocks_override=16); print(s.url)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("http://127.0.0.1:") and done.stderr == ""
