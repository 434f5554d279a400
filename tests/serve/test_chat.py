"""/v1/chat/completions through the official client, sync and async."""

import asyncio

import pytest

from kvlab import SamplingParams

QUESTION = [{"role": "user", "content": "What is a KV block?"}]
CHINESE = [{"role": "user", "content": "为什么分页能提高吞吐？"}]


@pytest.fixture
def client(server):
    return server.openai()


def expected(offline, messages, **params) -> list[str]:
    (output,) = offline.chat(messages, SamplingParams(**params))
    return [completion.text for completion in output.outputs]


def test_an_answer(client, offline):
    found = client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    (wanted,) = expected(offline, QUESTION, temperature=0, max_tokens=None)
    choice = found.choices[0]
    assert choice.message.content == wanted and choice.message.role == "assistant"
    assert choice.finish_reason == "stop"  # without max_tokens it goes on to its end
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-")


def test_a_stream_opens_with_the_role_and_adds_up(client, offline):
    (wanted,) = expected(offline, CHINESE, temperature=0, max_tokens=60)
    params = {"model": "tiny", "messages": CHINESE, "temperature": 0, "max_completion_tokens": 60}
    chunks = list(client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
    assert len(chunks) > 10  # it came in pieces


def test_a_character_split_over_tokens_is_never_half_sent(client, offline):
    messages = [{"role": "user", "content": "你是谁？"}]
    params = {"temperature": 0, "max_tokens": 40}
    (output,) = offline.chat(messages, SamplingParams(**params))
    parts = [token for token in output.outputs[0].token_ids if "\ufffd" in offline.tokenizer.decode([token])]
    assert len(parts) > 10, "this answer splits no characters"
    pieces = []
    for chunk in client.chat.completions.create(model="tiny", messages=messages, stream=True, **params):
        pieces.append(chunk.choices[0].delta.content or "")
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert "".join(pieces) == output.outputs[0].text


def test_each_of_n_has_a_role_a_text_and_a_reason(client, offline):
    params = {"temperature": 2.0, "n": 4, "seed": 9, "max_tokens": 8, "stop": ["is", "块"]}
    wanted = offline.chat(QUESTION, SamplingParams(**params))[0].outputs
    assert len({completion.finish_reason for completion in wanted}) == 2, "choose a seed that shows both reasons"
    found = client.chat.completions.create(model="tiny", messages=QUESTION, **params)
    assert [(c.message.content, c.finish_reason) for c in found.choices] == [(c.text, c.finish_reason) for c in wanted]
    text, reason, roles = {}, {}, []
    for chunk in client.chat.completions.create(model="tiny", messages=QUESTION, stream=True, **params):
        (choice,) = chunk.choices
        roles += [choice.index] if choice.delta.role else []
        text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
        if choice.finish_reason:
            reason[choice.index] = choice.finish_reason
    assert roles == [0, 1, 2, 3]
    assert [(text[i], reason[i]) for i in range(4)] == [(c.text, c.finish_reason) for c in wanted]


def test_logprobs_name_tokens_and_their_bytes(client):
    params = {"model": "tiny", "messages": CHINESE, "temperature": 0, "max_tokens": 20, "logprobs": True}
    choice = client.chat.completions.create(**params, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 20 and all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)  # greedy takes the likeliest
    for entry in entries:
        if entry.bytes is None:
            assert entry.token.startswith("token_id:")  # a part of a character has no text
        else:
            assert bytes(entry.bytes).decode() == entry.token
    assert client.chat.completions.create(**params).choices[0].logprobs.content[0].top_logprobs == []


def test_parts_of_text_and_the_role_of_a_developer(client, offline):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a KV block?"}]
    params = {"model": "tiny", "temperature": 0, "max_tokens": 10}
    whole = client.chat.completions.create(messages=QUESTION, **params).choices[0].message.content
    found = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **params)
    assert found.choices[0].message.content == whole
    told = [{"role": "developer", "content": "Be brief."}, *QUESTION]
    as_system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    found = client.chat.completions.create(messages=told, **params)
    assert found.choices[0].message.content == expected(offline, as_system, temperature=0, max_tokens=10)[0]


def test_the_async_client_in_parallel(server, offline):
    questions = ["What is a KV block?", "What is the block size?", "What does swapping do?", "What is prefill?"]
    wanted = [expected(offline, [{"role": "user", "content": q}], temperature=0, max_tokens=12)[0] for q in questions]

    async def ask(client, question):
        stream = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": question}],
                                                      temperature=0, max_tokens=12, stream=True)  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with server.async_openai() as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    assert asyncio.run(all_of_them()) == wanted
