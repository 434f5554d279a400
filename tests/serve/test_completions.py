"""/v1/completions through the official client: every answer is the one that LLM.generate gives."""

import pytest

from kvlab import SamplingParams

PROMPTS = ["What is a KV block?", "A block table", "The block size is"]


def texts(response) -> list[str]:
    return [choice.text for choice in sorted(response.choices, key=lambda choice: choice.index)]


def collect(stream) -> tuple[dict[int, str], dict[int, str], list]:
    """(text, finish reason) of each choice, and all chunks."""
    text, reasons, chunks = {}, {}, []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            assert choice.index not in reasons, "a choice went on after its finish reason"
            text[choice.index] = text.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return text, reasons, chunks


@pytest.fixture
def client(server):
    return server.openai()


def expected(offline, prompts, **params):
    outputs = offline.generate(prompts, SamplingParams(**params))
    return [completion.text for output in outputs for completion in output.outputs]


def test_one_prompt(client, offline):
    found = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=20)
    assert texts(found) == expected(offline, PROMPTS[0], temperature=0, max_tokens=20)
    assert found.object == "text_completion" and found.id.startswith("cmpl-") and found.model == "tiny"
    usage = found.usage
    assert usage.completion_tokens == 20 and usage.total_tokens == usage.prompt_tokens + 20
    assert found.choices[0].finish_reason == "length"


def test_the_default_is_sixteen_tokens(client):
    assert client.completions.create(model="tiny", prompt="x", temperature=0).usage.completion_tokens <= 16


def test_every_form_of_a_prompt(client, offline):
    ids = [offline.tokenizer.encode(prompt) for prompt in PROMPTS]
    whole = expected(offline, PROMPTS, temperature=0, max_tokens=8)
    for prompt, answers in ((PROMPTS, whole), (ids, whole), (ids[1], whole[1:2]), (PROMPTS[2], whole[2:])):
        found = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8)
        assert texts(found) == answers
        assert [choice.index for choice in found.choices] == list(range(len(answers)))
    found = client.completions.create(model="tiny", prompt=PROMPTS, temperature=0, max_tokens=8)
    assert found.usage.prompt_tokens == sum(map(len, ids))


def test_n_and_seed_and_everything_the_sampler_knows(client, offline):
    openai_params = {"temperature": 1.5, "top_p": 0.9, "seed": 7, "max_tokens": 12, "presence_penalty": 0.5}
    openai_params |= {"frequency_penalty": 0.25}
    extra = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True}
    found = client.completions.create(model="tiny", prompt=PROMPTS[:2], n=3, extra_body=extra, **openai_params)
    wanted = expected(offline, PROMPTS[:2], n=3, **openai_params, **extra)
    assert texts(found) == wanted and len(set(wanted)) > 2
    stream = client.completions.create(model="tiny", prompt=PROMPTS[:2], n=3, extra_body=extra, stream=True,
                                       **openai_params)  # fmt: skip
    text, reasons, _ = collect(stream)
    assert [text[i] for i in range(6)] == wanted
    assert reasons == dict.fromkeys(range(6), "length")


def test_best_of_returns_the_likeliest(client, offline):
    params = {"temperature": 2.0, "seed": 3, "max_tokens": 6, "n": 2, "best_of": 4}
    found = client.completions.create(model="tiny", prompt=PROMPTS[0], **params)
    assert texts(found) == expected(offline, PROMPTS[0], **params)
    assert found.usage.completion_tokens == 24  # those that are not returned were computed, too


def test_logit_bias_and_stop_token_ids(client, offline):
    token = offline.tokenizer.encode(" KV", add_special_tokens=False)[0]
    found = client.completions.create(model="tiny", prompt="A", temperature=0, max_tokens=4,
                                      logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]})  # fmt: skip
    assert found.choices[0].finish_reason == "stop" and found.choices[0].stop_reason == token
    assert found.choices[0].text == ""


def test_a_stop_string_over_several_tokens_is_never_half_shown(client, offline):
    (whole,) = expected(offline, PROMPTS[0], temperature=0, max_tokens=40)
    stop = whole[12:19]  # from the midst of one word into the next
    assert len(offline.tokenizer.encode(stop)) > 1
    params = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 40, "stop": [stop, "never there"]}
    found = client.completions.create(**params)
    assert texts(found) == [whole[: whole.index(stop)]]
    assert found.choices[0].finish_reason == "stop" and found.choices[0].stop_reason == stop
    text, reasons, chunks = collect(client.completions.create(**params, stream=True))
    assert text == {0: texts(found)[0]} and reasons == {0: "stop"}
    assert chunks[-1].choices[0].stop_reason == stop
    kept = client.completions.create(**params, extra_body={"include_stop_str_in_output": True})
    assert texts(kept) == [whole[: whole.index(stop) + len(stop)]]


def test_logprobs(client, offline):
    params = {"temperature": 0, "max_tokens": 5, "logprobs": 2}
    found = client.completions.create(model="tiny", prompt=PROMPTS[0], **params).choices[0]
    (output,) = offline.generate(PROMPTS[0], SamplingParams(**params))
    wanted = output.outputs[0].logprobs
    tokens = output.outputs[0].token_ids
    assert found.logprobs.tokens == [entry[t].decoded_token for t, entry in zip(tokens, wanted, strict=True)]
    assert found.logprobs.token_logprobs == pytest.approx(
        [entry[t].logprob for t, entry in zip(tokens, wanted, strict=True)], abs=1e-4
    )
    assert all(len(top) == 2 for top in found.logprobs.top_logprobs)
    for offset, token in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True):
        assert found.text[offset:].startswith(token)
    stream = client.completions.create(model="tiny", prompt=PROMPTS[0], stream=True, **params)
    streamed = [choice.logprobs for chunk in stream for choice in chunk.choices]
    assert sum((part.tokens for part in streamed if part), []) == found.logprobs.tokens
    assert sum((part.text_offset for part in streamed if part), []) == found.logprobs.text_offset


def test_echo(client, offline):
    params = {"model": "tiny", "temperature": 0, "max_tokens": 5, "echo": True}
    plain = client.completions.create(**params | {"echo": False}, prompt=PROMPTS[1]).choices[0].text
    assert client.completions.create(**params, prompt=PROMPTS[1]).choices[0].text == PROMPTS[1] + plain
    ids = offline.tokenizer.encode(PROMPTS[1], add_special_tokens=False)
    assert client.completions.create(**params, prompt=ids).choices[0].text == PROMPTS[1] + plain
    text, _, _ = collect(client.completions.create(**params, prompt=PROMPTS[1], n=2, stream=True))
    assert text == dict.fromkeys((0, 1), PROMPTS[1] + plain)


def test_the_likelihood_of_a_text_is_echo_without_new_tokens(client, offline):
    """What evaluation harnesses ask: logprobs of the prompt alone."""
    found = client.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=0, echo=True, logprobs=1)
    choice = found.choices[0]
    (output,) = offline.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    ids = output.prompt_token_ids
    assert choice.text == PROMPTS[1] and found.usage.completion_tokens == 0
    assert len(choice.logprobs.tokens) == len(ids) and choice.logprobs.token_logprobs[0] is None
    wanted = [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-4)


def test_prompt_logprobs_in_vllms_form(client, offline):
    found = client.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=1, extra_body={"prompt_logprobs": 1})
    ids = offline.tokenizer.encode(PROMPTS[1])
    entries = found.choices[0].prompt_logprobs
    assert entries[0] is None and len(entries) == len(ids)
    assert all(entries[i][str(ids[i])]["rank"] >= 1 for i in range(1, len(ids)))


def test_usage_comes_after_the_finish_chunk(client):
    params = {"model": "tiny", "prompt": PROMPTS, "temperature": 0, "max_tokens": 6, "stream": True}
    _, reasons, chunks = collect(client.completions.create(**params, stream_options={"include_usage": True}))
    assert len(reasons) == 3 and chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 18
    assert all(chunk.usage is None for chunk in chunks[:-1])
    _, _, chunks = collect(client.completions.create(**params))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, chunks = collect(client.completions.create(**params, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 18 and counts[0] < 18


def test_cached_tokens_are_told(client):
    prompt = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    salted = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_two_requests_with_the_same_id_are_answered_apart(server, client, offline):
    import concurrent.futures

    def ask(prompt):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
        return server.post("/v1/completions", body, headers={"X-Request-Id": "mine.1"})

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, PROMPTS[:2]))
    wanted = expected(offline, PROMPTS[:2], temperature=0, max_tokens=8)
    assert [answer.json()["choices"][0]["text"] for answer in answers] == wanted
    assert {answer.json()["id"] for answer in answers} == {"cmpl-mine.1"}
    assert {answer.headers["x-request-id"] for answer in answers} == {"cmpl-mine.1"}
    odd = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "a#b c"})
    assert odd.status_code == 200 and "#" not in odd.json()["id"]
