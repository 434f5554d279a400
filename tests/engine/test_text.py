"""Text while it streams: whole characters, stop strings across tokens, and nothing lost or shown too early."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine import LLM
from kvlab.engine.text import Detokenizer, StopChecker
from kvlab.engine.tokenizer import Tokenizer
from kvlab.sampling_params import SamplingParams
from kvlab.tiny import MODEL_DIR

TOKENIZER = Tokenizer(MODEL_DIR)
QUESTION = [{"role": "user", "content": "What is a block table?"}]


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", num_gpu_blocks_override=200)


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab 块表分页注意力🙂🧑‍🚀é\n"), max_size=30), st.randoms())
def test_pieces_add_up_to_the_text_and_never_break_a_character(text, rng):
    token_ids = TOKENIZER.encode(text)
    detokenizer, pieces, start = Detokenizer(TOKENIZER.decode), [], 0
    while start < len(token_ids):
        stop = min(len(token_ids), start + rng.randint(1, 3))
        pieces.append(detokenizer.add(token_ids[start:stop]))
        start = stop
    pieces.append(detokenizer.add([], final=True))
    assert "".join(pieces) == TOKENIZER.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_shown_when_there_is_nothing_more_to_come():
    token_ids = next(ids for ids in (TOKENIZER.encode(c) for c in "龘靐齉") if len(ids) > 1)
    detokenizer = Detokenizer(TOKENIZER.decode)
    assert detokenizer.add(token_ids[:1]) == ""
    assert detokenizer.add([], final=True) == "\ufffd"


def cut(text: str, stop: tuple[str, ...], include: bool) -> str:
    """The whole text up to the stop string that is complete first: what any cutting into pieces must give."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[:end] if include else text[: end - max(map(len, hits))]
    return text


@settings(max_examples=400)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(pieces, stop, include):
    checker, shown, found = StopChecker(tuple(stop), include), "", None
    full = cut("".join(pieces), tuple(stop), include)
    for i, piece in enumerate(pieces):
        text, found = checker.add(piece, final=i == len(pieces) - 1)
        shown += text
        assert full.startswith(shown), "something was shown that a stop string takes back"
        if found:
            break
    assert shown == full
    assert (found is not None) == any(s in "".join(pieces) for s in stop)


def test_a_stop_string_is_held_back_only_while_it_may_come():
    checker = StopChecker(("STOP",), include_stop=False)
    assert [checker.add(piece)[0] for piece in ("aS", "T", "x", "ST")] == ["a", "", "STx", ""]
    assert checker.add("OP!") == ("", "STOP")


def test_a_stop_string_from_before_min_tokens_is_not_found_later():
    checker = StopChecker(("b", "abc"))
    assert checker.add("ab", may_stop=False) == ("", None)  # held back: it may become abc
    assert checker.add("x") == ("abx", None)
    assert checker.add("ab") == ("a", "b")


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_a_request_at_once_and_free_its_blocks(llm, include):
    plain = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    stop = plain.text[20:27]  # spans tokens
    params = SamplingParams(temperature=0, max_tokens=60, stop=[stop, "never"], include_stop_str_in_output=include)
    ended = llm.chat(QUESTION, params)[0].outputs[0]
    assert ended.text == plain.text[: plain.text.index(stop)] + stop * include
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.token_ids == plain.token_ids[: len(ended.token_ids)] and len(ended.token_ids) < len(plain.token_ids)
    deltas = list(llm.stream(QUESTION, params))
    assert "".join(delta.text for delta in deltas) == ended.text
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert llm.stats()["usage"] == 0 and not llm.engine.has_unfinished_requests()


def test_min_tokens_lets_a_stop_string_pass(llm):
    plain = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    stop = plain.text[:3]
    params = SamplingParams(temperature=0, max_tokens=60, min_tokens=10, stop=stop)
    assert len(llm.chat(QUESTION, params)[0].outputs[0].token_ids) >= 10


def test_one_sibling_stops_and_the_others_go_on(llm):
    params = SamplingParams(temperature=6.0, seed=1, n=3, max_tokens=24, ignore_eos=True)
    plain = llm.chat(QUESTION, params)[0].outputs
    pieces = [plain[0].text[i : i + 4] for i in range(5, 40)]
    stop = next(piece for piece in pieces if all(piece not in completion.text for completion in plain[1:]))
    stopped = llm.chat(QUESTION, replace(params, stop=(stop,)))[0].outputs
    assert stopped[0].finish_reason == "stop" and stopped[0].text == plain[0].text[: plain[0].text.index(stop)]
    assert [c.text for c in stopped[1:]] == [c.text for c in plain[1:]]


def test_the_token_that_ends_a_text_is_no_part_of_it(llm):
    plain = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0]
    stop = plain.token_ids[5]
    first = plain.token_ids.index(stop)
    ended = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[stop]))[0].outputs[0]
    assert ended.token_ids[-1] == stop
    assert ended.text == llm.tokenizer.decode(plain.token_ids[:first])
    shown = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert llm.chat(QUESTION, shown)[0].outputs[0].text == llm.tokenizer.decode(plain.token_ids[: first + 1])


@pytest.mark.parametrize(
    "words, call",
    [
        ("give valid Unicode", lambda llm: llm.generate("\ud800")),
        ("give valid Unicode", lambda llm: llm.chat([{"role": "user", "content": "\udcff"}])),
        ("each is {'role'", lambda llm: llm.chat([{"role": "user"}])),
        ("each is {'role'", lambda llm: llm.chat([["hello"]])),
        ("cache_salt is", lambda llm: llm.generate("fine", cache_salt="\ud800")),
    ],
)
def test_text_that_is_none_is_refused_and_nothing_is_left_behind(llm, words, call):
    with pytest.raises(ValueError, match=words):
        call(llm)
    assert not llm.engine.has_unfinished_requests()
    assert llm.chat(QUESTION)[0].outputs[0].finish_reason == "stop"


def test_an_interrupt_amid_a_step_leaves_the_engine_whole_and_others_their_tokens(llm, monkeypatch):
    expected = "".join(delta.text for delta in llm.stream(QUESTION))
    stream = llm.stream(QUESTION)
    text = next(stream).text
    scheduler = llm.engine.scheduler
    update = scheduler.update_from_output

    def interrupted(*args):
        results = update(*args)
        signal.raise_signal(signal.SIGINT)  # the tokens exist, and nobody has them yet
        return results

    monkeypatch.setattr(scheduler, "update_from_output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("another call")
    monkeypatch.undo()
    assert text + "".join(delta.text for delta in stream) == expected
    assert llm.stats()["usage"] == 0 and not llm.engine.has_unfinished_requests()
    llm.engine.scheduler.manager.check()
