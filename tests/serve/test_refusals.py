"""What is refused, and how: OpenAI's shape, the right status, the field by name, and nothing of the server's own."""

import json
from pathlib import Path

import openai
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import kvlab
from kvlab.serve.fields import IGNORED, INSTEAD, NEUTRAL

PACKAGE = Path(kvlab.__file__).parent
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def refused(response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message, once all the rest has been checked."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert str(PACKAGE) not in error["message"]
    return error["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["x", ""]}, "prompt", "empty"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": [1, "x"]}, "prompt", "give a string"),
        ({"prompt": [[1], "x"]}, "prompt", "give a string"),
        ({"prompt": {"text": "x"}}, "prompt", "give a string"),
        ({"prompt": [True]}, "prompt", "give a string"),
        ({"prompt": [2048]}, "prompt", "token ids are whole numbers"),
        ({"prompt": [-1]}, "prompt", "token ids are whole numbers"),
        ({"prompt": "\ud800"}, "prompt", "valid Unicode"),
        ({"prompt": ["x"] * 2000}, "prompt", "1024"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": "5"}, "max_tokens", "'5'"),
        ({"n": 0}, "n", "0"),
        ({"n": 129}, "n", "128"),
        ({"best_of": 1, "n": 2}, "best_of", "at least as many"),
        ({"best_of": 2, "stream": True}, "best_of", "stream"),
        ({"temperature": -1}, "temperature", "greedy"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "0.01"),
        ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"9999": 1}}, None, "logit_bias holds 9999"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": "x" * 1001}, "stop", "1000"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": 5}, "stop", "5"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids", "integer"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"seed": 2**64}, "seed", str(2**63)),
        ({"min_tokens": 5}, "min_tokens", "max_tokens"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "stream"),
        ({"suffix": "end"}, "suffix", "only continue"),
        ({"use_beam_search": True}, "use_beam_search", "LLM.beam_search"),
        ({"messages": []}, "messages", "chat"),
        ({"temprature": 0}, "temprature", "not supported"),
        ({"x" * 1000: 0}, "x" * 57 + "...", "not supported"),
        ({"cache_salt": "\n"}, None, "printable"),
    ],
)
def test_a_completion_that_cannot_be(server, change, param, says):
    assert says in refused(server.post("/v1/completions", COMPLETION | change), 400, param)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "missing"),
        ({"messages": "x"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages", "missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'text'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "string"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages", "at most 0"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"tools": [{"type": "function"}]}, "tools", "no tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "plain text"),
        ({"prompt": "x"}, "prompt", "messages"),
    ],
)
def test_a_chat_that_cannot_be(server, change, param, says):
    assert says in refused(server.post("/v1/chat/completions", CHAT | change), 400, param)


def test_what_changes_nothing_is_taken(server):
    harmless = dict.fromkeys(IGNORED, "anything") | {name: values[0] for name, values in NEUTRAL.items()}
    assert server.post("/v1/chat/completions", CHAT | harmless).status_code == 200
    assert server.post("/v1/completions", COMPLETION | harmless).status_code == 200
    nulls = dict.fromkeys([*NEUTRAL, *INSTEAD, "guided_json", "stop", "seed", "stream_options", "n"])
    del nulls["prompt"], nulls["messages"]
    assert server.post("/v1/completions", COMPLETION | nulls).status_code == 200
    for name in NEUTRAL:
        if name != "echo":
            refused(server.post("/v1/completions", COMPLETION | {name: "another value"}), 400, name)


@pytest.mark.parametrize("prompt", ["word " * 3000, "word " * 500_000, [1] * 2048])
def test_a_prompt_longer_than_the_context(server, prompt):
    response = server.post("/v1/completions", COMPLETION | {"prompt": prompt})
    assert "2048" in refused(response, 400, "prompt", "context_length_exceeded")


def test_more_outputs_than_the_context_holds(server):
    response = server.post("/v1/chat/completions", CHAT | {"max_tokens": 2048})
    assert "together" in refused(response, 400, "messages", "context_length_exceeded")
    # Without max_tokens it is as many as fit: not the client's fault.
    almost = server.post("/v1/completions", {"prompt": [5] * 2046, "temperature": 0, "ignore_eos": True})
    assert almost.json()["usage"]["completion_tokens"] == 2


def test_one_too_long_of_several_starts_none(server):
    before = server.stats()["num_finished"]
    response = server.post("/v1/completions", COMPLETION | {"prompt": ["x", "word " * 3000]})
    assert refused(response, 400, "prompt", "context_length_exceeded").startswith("prompt 1: ")
    assert server.stats()["num_finished"] == before


def test_what_only_the_engine_can_refuse(own_server):
    """A pool that is smaller than the context: known when the request is added, and 400 all the same."""
    small = own_server({"num_gpu_blocks_override": 5})
    for stream in (False, True):
        response = small.post("/v1/completions", COMPLETION | {"prompt": [5] * 100, "stream": stream})
        assert "KV blocks" in refused(response, 400)
    response = small.post("/v1/completions", COMPLETION | {"prompt": [[5] * 10, [5] * 100]})
    assert "prompt 1: " in refused(response, 400)
    assert small.post("/v1/completions", COMPLETION).status_code == 200
    small.wait_until_idle()
    small.check_pool()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "JSON object"),
        (b"{", "no valid JSON"),
        (b"null", "JSON object"),
        (b"[]", "JSON object"),
        (b'"x"', "JSON object"),
        (b"\xff\xfe{}", "JSON"),
        (b"[" * 200_000, "pars"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "pars"),
        (b'{"prompt": "x", "seed": ' + b"1" * 10_000 + b"}", "pars"),
        (b'{"prompt": "x", "temperature": NaN}', "finite"),
        (b'{"prompt": "x", "temperature": 1e999}', "finite"),
    ],
)
def test_bodies_that_are_no_requests(server, content, says):
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and says in response.json()["error"]["message"], response.text


def test_a_body_without_its_content_type(server):
    response = server.http.post("/v1/completions", content=json.dumps(COMPLETION))
    assert "Content-Type" in refused(response, 400)


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_body_of_ten_megabytes(server, says_its_length):
    content = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    pieces = (content[i : i + 65536] for i in range(0, len(content), 65536))
    response = server.http.post("/v1/completions", content=content if says_its_length else pieces,
                                headers={"Content-Type": "application/json"})  # fmt: skip
    assert "4194304 bytes" in refused(response, 413)
    assert server.post("/v1/completions", COMPLETION).status_code == 200


def test_other_models_and_other_paths(server):
    assert "'gpt'" in refused(server.post("/v1/completions", COMPLETION | {"model": "gpt"}), 404, "model",
                              "model_not_found")  # fmt: skip
    odd = server.post("/v1/completions", COMPLETION | {"model": "\ud800" * 300})
    assert odd.status_code == 404
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200  # one model: its name may be left out
    refused(server.http.get("/v1/models/gpt"), 404, "model", "model_not_found")
    assert "GET /v1/embeddings" in refused(server.http.get("/v1/embeddings"), 404)
    get = server.http.get("/v1/completions")
    assert "GET /v1/completions" in refused(get, 405) and get.headers["allow"] == "POST"


def test_the_client_raises_its_own_errors(server):
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt", prompt="x")
    assert raised.value.code == "model_not_found" and raised.value.param == "model"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="", stream=True)
    assert raised.value.param == "prompt"


ODD = [True, 0, 1, -1, 0.5, 1e-30, 1e308, 10**12, 2**63, "", "x", "块", "\ud800", [], [1], ["x"], {}, {"1": 5}, [[1]]]
FIELDS = {
    "prompt": ["x", "块", [5, 6], ["a", "b"], [[5], [6, 7]]], "n": [1, 3], "best_of": [3, 4], "top_p": [1e-9, 1],
    "temperature": [0, 1e-30, 1e6], "top_k": [-1, 0, 10**12], "min_p": [0, 1], "repetition_penalty": [0.01, 100],
    "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2], "logit_bias": [{"5": 100, "6": -100}],
    "max_tokens": [1, 4], "stop": ["a", ["e", "块"]], "stop_token_ids": [[5], [5, 2047]], "min_tokens": [0, 1],
    "seed": [-1, 2**63 - 1], "ignore_eos": [True, False], "stream": [True, False], "echo": [True, False],
    "logprobs": [0, 20], "prompt_logprobs": [0, 2], "priority": [-1, 5], "cache_salt": ["a"], "model": ["tiny"],
    "request_id": ["mine"], "stream_options": [{"include_usage": True}],
}  # fmt: skip
SENSIBLE = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in FIELDS.items()})
ODD_FIELD = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.sampled_from(ODD), max_size=1)


@given(st.builds(lambda sensible, odd: sensible | odd, SENSIBLE, ODD_FIELD))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_is_answered_or_refused_and_never_fails(server, body):
    if not body.get("stream"):
        body.pop("stream_options", None)
    response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 3} | body)
    event(f"{response.status_code}")
    assert response.status_code in (200, 400, 404) and "server_error" not in response.text, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif body.get("stream") is True:
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"]
