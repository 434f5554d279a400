"""A client that leaves takes its request with it, within a step, wherever the request was."""

import json
import socket

import pytest

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def connect(server, body: dict) -> socket.socket:
    """A request on the wire, and nobody reading the answer yet."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}"
    client = socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2])), timeout=60)
    client.sendall(head.encode() + b"\r\n\r\n" + content)
    return client


def steps_until_gone(server, client: socket.socket) -> int:
    """Hang up; the steps that the engine made until the request had ended."""
    client.close()
    before = server.num_steps
    server.wait_until_idle()
    return server.num_steps - before


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(server, stream):
    server.slow = 0.2
    client = connect(server, LONG | {"stream": stream})
    server.wait_until(lambda: server.desk.stats["num_running"] or server.desk._calls)
    assert steps_until_gone(server, client) <= 5  # of 1500; one was under way


@pytest.mark.parametrize("stream", [False, True])
def test_in_the_middle(server, stream):
    server.slow = 0.1
    before = server.num_steps
    client = connect(server, LONG | {"stream": stream})
    server.wait_until(lambda: server.num_steps >= before + 4)
    if stream:
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    assert steps_until_gone(server, client) <= 5
    server.wait_until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_with_many_children_and_prompts(server, stream):
    server.slow = 0.1
    before = server.num_steps
    client = connect(server, LONG | {"stream": stream, "prompt": ["x", "y", "z"], "n": 3, "temperature": 1})
    server.wait_until(lambda: server.num_steps >= before + 3)
    assert steps_until_gone(server, client) <= 5


@pytest.mark.parametrize("stream", [False, True])
def test_while_waiting_for_a_seat(own_server, stream):
    server = own_server({"max_num_seqs": 1})
    server.slow = 0.05
    sitting = connect(server, LONG)
    server.wait_until(lambda: server.desk.stats["num_running"] == 1)
    waiting = connect(server, LONG | {"stream": stream})
    server.wait_until(lambda: server.desk.stats["num_waiting"] == 1)
    waiting.close()
    server.wait_until(lambda: server.desk.stats["num_waiting"] == 0)
    assert server.desk.stats["num_running"] == 1  # the other one goes on
    sitting.close()
    server.wait_until_idle()
    server.check_pool()


def test_while_its_body_is_still_coming(server):
    client = socket.create_connection(("127.0.0.1", int(server.base.rpartition(":")[2])))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                   b"Content-Length: 1000\r\n\r\n{")  # fmt: skip
    client.close()
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_the_official_client_closing_its_stream(server):
    server.slow = 0.05
    body = {name: value for name, value in LONG.items() if name != "ignore_eos"}
    stream = server.openai().completions.create(stream=True, extra_body={"ignore_eos": True}, **body)
    for _ in range(3):
        next(stream)
    before = server.num_steps
    stream.close()
    server.wait_until_idle()
    assert server.num_steps - before <= 8


def test_one_that_reads_nothing_blocks_nobody(server):
    lazy = connect(server, LONG | {"stream": True, "n": 4, "temperature": 1.0})
    for _ in range(3):
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 4}).status_code == 200
    lazy.close()
