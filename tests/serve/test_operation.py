"""What operators look at: health, metrics, the trace, keys, the queue's limit, errors of the engine."""

import concurrent.futures
import json

import httpx
import openai
import pytest

from kvlab.events import Recorder
from kvlab.serve import ServerArgs

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 3, "ignore_eos": True, "temperature": 0}


def test_models(server):
    (card,) = server.openai().models.list().data
    assert card.id == "tiny" and card.object == "model" and card.max_model_len == 2048
    assert server.openai().models.retrieve("tiny").id == "tiny"


def test_health(server):
    response = server.http.get("/health")
    assert response.status_code == 200 and response.json() == {"status": "ok"}


def test_metrics_count_what_was_asked(server):
    names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"]
    names += ["vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"]
    names += ["vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count"]
    names += ["vllm:request_prefill_time_seconds_count", "vllm:request_decode_time_seconds_count"]
    names += ["vllm:request_params_n_sum", "vllm:prefix_cache_queries_total", "vllm:request_success_total"]
    before = {name: server.metric(name, model_name="tiny", engine="0") for name in names[:-1]}
    before[names[-1]] = server.metric(names[-1], finished_reason="length")
    usage = server.post("/v1/completions", SHORT | {"n": 2, "prompt": ["x y", "z"]}).json()["usage"]
    after = {name: server.metric(name, model_name="tiny", engine="0") for name in names[:-1]}
    after[names[-1]] = server.metric(names[-1], finished_reason="length")
    grown = [after[name] - before[name] for name in names]
    prompt = usage["prompt_tokens"]
    assert usage["completion_tokens"] == 12
    assert grown == [prompt, 12, 2, 8, 8, 2, 2, 2, 2, 4, prompt, 4]


def test_gauges_show_the_moment_and_return_to_zero(server):
    server.slow = 0.05
    with server.openai().completions.create(stream=True, extra_body={"ignore_eos": True}, model="tiny", prompt="x",
                                            max_tokens=500) as stream:  # fmt: skip
        next(stream)
        assert server.metric("vllm:num_requests_running") == 1
        assert server.metric("vllm:kv_cache_usage_perc") == server.metric("vllm:gpu_cache_usage_perc") > 0
    server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == server.metric("vllm:num_requests_waiting") == 0


def test_metrics_are_readable_by_prometheus_own_parser(server):
    from prometheus_client.parser import text_string_to_metric_families

    response = server.http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["vllm:num_requests_running"].type == "gauge"
    assert families["vllm:time_per_output_token_seconds"].type == "histogram"
    assert families["vllm:prefix_cache_hits"].type == "counter"
    assert response.headers["content-type"].startswith("text/plain")


def test_the_trace_is_what_recorder_load_reads(server, tmp_path):
    server.post("/v1/completions", SHORT, headers={"X-Request-Id": "traced"})
    lines = server.http.get("/debug/trace", params={"kind": ["add", "finish"]}).text
    (tmp_path / "trace.jsonl").write_text(lines)
    events = [event for event in Recorder.load(tmp_path / "trace.jsonl").events() if "traced" in event.request_id]
    assert [event.kind for event in events] == ["add", "finish"] and events[1].values == ("length", 3)
    assert len(server.http.get("/debug/trace", params={"last": 7}).text.splitlines()) == 7
    assert server.http.get("/debug/trace", params={"last": 0}).status_code == 400


def test_keys(own_server):
    server = own_server(api_key=("secret one", "schlüssel"))
    with pytest.raises(openai.AuthenticationError) as raised:
        server.openai(api_key="wrong").models.list()
    assert raised.value.code == "invalid_api_key" and "secret" not in str(raised.value)
    assert server.openai(api_key="secret one").completions.create(model="tiny", prompt="x", max_tokens=1).choices
    by_hand = {"Authorization": "Bearer schlüssel".encode()}
    assert server.http.get("/v1/models", headers=by_hand).status_code == 200
    for header in ("", "Bearer", "secret one", "Basic secret one", "Bearer secret one x"):
        refused = server.http.get("/v1/models", headers={"Authorization": header})
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert server.http.post("/v1/completions", content=b"x" * 5_000_000).status_code == 401
    assert server.http.get("/debug/trace").status_code == 401
    assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


def test_no_page_of_another_site_may_read_answers(server):
    response = server.http.get("/v1/models", headers={"Origin": "https://example.org"})
    assert not any(name.startswith("access-control") for name in response.headers)


def test_the_queue_has_an_end(own_server):
    server = own_server({"max_num_seqs": 2}, max_waiting=1)
    server.slow = 0.05

    def ask(_):
        return server.post("/v1/completions", LONG | {"max_tokens": 20})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sitting = [pool.submit(ask, i) for i in range(2)]
        server.wait_until(lambda: server.desk.stats["num_running"] == 2)
        waiting = pool.submit(ask, 2)
        server.wait_until(lambda: server.desk.stats["num_waiting"] == 1)
        refused = ask(3)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model="tiny", prompt="x", stream=True)
        assert [each.result().status_code for each in (*sitting, waiting)] == [200] * 3
    assert server.metric("vllm:admission_rejections_total", reason="max_waiting") == 2
    assert ask(4).status_code == 200


def test_a_burst_into_free_seats_is_not_a_queue(own_server):
    server = own_server({"max_num_seqs": 8}, max_waiting=0)
    server.slow = 0.2  # they all come within one step
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", SHORT), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


def fail_at(server, request_name: str) -> None:
    """Make the model fail whenever a request of this name is in the batch."""
    execute = server.llm.engine_core.runner.execute

    def failing(output):
        if any(request_name in request.request_id for request, _ in output.scheduled):
            raise RuntimeError("the weights in /secret/model are on fire")
        return execute(output)

    server.llm.engine_core.runner.execute = failing


def test_a_request_that_fails_alone(own_server, caplog):
    server = own_server()
    fail_at(server, "cursed")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        fine = pool.submit(server.post, "/v1/completions", SHORT | {"max_tokens": 40})
        cursed = server.post("/v1/completions", SHORT, headers={"X-Request-Id": "cursed"})
        assert fine.result().status_code == 200
    assert cursed.status_code == 500 and cursed.json()["error"]["code"] == "request_failed"
    assert "secret" not in cursed.text and "secret" in caplog.text
    assert server.metric("vllm:request_success_total", finished_reason="error") == 1
    assert server.http.get("/health").status_code == 200
    server.check_pool()


def test_an_error_in_the_middle_of_a_stream_is_an_event(own_server):
    server = own_server()
    server.slow = 0.05
    with httpx.stream("POST", f"{server.base}/v1/completions", json=LONG | {"stream": True, "n": 2},
                      headers={"X-Request-Id": "late"}, timeout=60) as response:  # fmt: skip
        lines = response.iter_lines()
        first = next(line for line in lines if line)
        assert json.loads(first.removeprefix("data: "))["choices"]
        fail_at(server, "late")
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "request_failed"
    server.wait_until_idle()
    server.check_pool()


def test_the_client_raises_what_a_stream_ends_with(own_server):
    server = own_server()
    server.slow = 0.05
    stream = server.openai().completions.create(model="tiny", prompt="x", stream=True, max_tokens=900,
                                                extra_headers={"X-Request-Id": "late"})  # fmt: skip
    next(stream)
    fail_at(server, "late")
    with pytest.raises(openai.APIError, match="the model failed"):
        list(stream)


def test_when_the_engine_thread_dies_everybody_is_told(own_server):
    server = own_server({"max_num_seqs": 2})
    server.slow = 0.05
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(3)]  # one of them waits
        stream = pool.submit(server.post, "/v1/completions", LONG | {"stream": True, "priority": -1})
        server.wait_until(lambda: server.desk.stats["num_running"] + server.desk.stats["num_waiting"] == 4)

        def broken():
            raise RuntimeError("the books in /secret/books are in doubt")

        server.llm.engine_core.scheduler.schedule = broken
        assert [each.result().status_code for each in whole] == [503] * 3
        assert {each.result().json()["error"]["code"] for each in whole} == {"engine_dead"}
        events = [line for line in stream.result().text.split("\n\n") if line]
    assert stream.result().status_code == 200 and events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert "secret" not in stream.result().text
    assert server.http.get("/health").status_code == 503
    assert server.post("/v1/completions", SHORT).status_code == 503
    assert server.http.get("/metrics").status_code == 200  # what led to it can still be read
    assert '"add"' in server.http.get("/debug/trace").text


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 70000},
        {"port": -1},
        {"max_waiting": -1},
        {"served_model_name": ()},
        {"api_key": ("",)},
        {"drain_timeout": -1},
        {"uvicorn_log_level": "loud"},
        {"max_body_bytes": 0},
    ],
)
def test_settings_that_make_no_server(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ServerArgs(**bad)
