"""Workloads drawn from a seed, and traces read from files: what is right, and what is told of what is not."""

import json
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.sim import (
    Arrival,
    Bursts,
    ClosedBatch,
    Empirical,
    Fixed,
    Lognormal,
    Poisson,
    Uniform,
    Workload,
    closed_batch,
    make_workload,
    read_trace,
)
from kvlab.sim.workload import OWN_TOKENS, parse_lengths

S = 1_000_000_000


def draws(lengths, number=20_000) -> list[int]:
    rng = Random(0)
    return [lengths.draw(rng) for _ in range(number)]


# ---- distributions


def test_lengths_are_what_they_say():
    assert set(draws(Fixed(7), 10)) == {7}
    uniform = draws(Uniform(10, 12))
    assert set(uniform) == {10, 11, 12} and mean(uniform) == pytest.approx(11, abs=0.05)
    lognormal = draws(Lognormal(200, 1.0))
    assert mean(lognormal) == pytest.approx(200, rel=0.05)
    middle = sorted(lognormal)[10_000]
    assert middle == pytest.approx(200 * 2.718281828**-0.5, rel=0.05)  # the median of a lognormal of sigma 1
    assert max(draws(Lognormal(200, 1.0, most=300))) == 300 and min(draws(Lognormal(1, 2.0))) == 1
    empirical = draws(Empirical([5, 5, 5, 9]))
    assert set(empirical) == {5, 9} and empirical.count(5) / 20_000 == pytest.approx(0.75, abs=0.02)


def test_arrivals_are_what_they_say():
    rng = Random(0)
    assert ClosedBatch().times(3, rng) == [0, 0, 0]
    assert Bursts(2, 1.5).times(5, rng) == [0, 0, 3 * S // 2, 3 * S // 2, 3 * S]
    times = Poisson(4).times(20_000, rng)
    gaps = [(b - a) / S for a, b in zip(times, times[1:], strict=False)]
    assert mean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert mean(gap**2 for gap in gaps) == pytest.approx(2 / 16, rel=0.05)  # the variance of an exponential
    assert times == sorted(times) and all(type(time) is int for time in times)


def test_a_seed_gives_one_workload_and_streams_do_not_disturb_each_other():
    one = make_workload(50, Lognormal(100), Uniform(1, 9), Poisson(2), seed=7)
    assert one.arrivals == make_workload(50, Lognormal(100), Uniform(1, 9), Poisson(2), seed=7).arrivals
    other = make_workload(50, Lognormal(100), Uniform(1, 9), Poisson(2), seed=8)
    assert [a.at_ns for a in one.arrivals] != [a.at_ns for a in other.arrivals]
    fixed = make_workload(50, Fixed(3), Uniform(1, 9), Poisson(2), seed=7)
    for name in ("at_ns", "output_tokens"):
        assert [getattr(a, name) for a in one.arrivals] == [getattr(a, name) for a in fixed.arrivals]


@pytest.mark.parametrize(
    "text, lengths",
    [("200", Fixed(200)), ("fixed:3", Fixed(3)), ("uniform:10:120", Uniform(10, 120)),
     ("lognormal:200", Lognormal(200.0)), ("lognormal:80.5:1.2", Lognormal(80.5, 1.2))],
)  # fmt: skip
def test_lengths_by_a_word(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "many", "uniform:1", "uniform:1:2:3", "lognormal:", "normal:5", "1.5", "fixed:x"])
def test_lengths_that_nobody_understands(text):
    with pytest.raises(ValueError, match="write 200, uniform:10:120 or lognormal:200:1.2"):
        parse_lengths(text)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Fixed(0), "tokens is 0: use a whole number >= 1"),
        (lambda: Uniform(5, 4), "uniform lengths from 5 to 4: give the smaller number first"),
        (lambda: Lognormal(0), "mean of lognormal lengths is 0: use a positive number"),
        (lambda: Lognormal(5, float("nan")), "sigma of lognormal lengths is nan"),
        (lambda: Empirical([]), "empirical lengths without a value"),
        (lambda: Empirical([3, 0]), "value is 0"),
        (lambda: Poisson(0), "rate is 0: use a positive number"),
        (lambda: Poisson(float("inf")), "rate is inf"),
        (lambda: Bursts(0, 1), "size is 0"),
        (lambda: make_workload(0, Fixed(1), Fixed(1)), "num_requests is 0"),
        (lambda: make_workload(1, Fixed(1), Fixed(1), prefix_tokens=-1), "prefix_tokens is -1"),
        (lambda: closed_batch([(3, 0)]), "output_tokens is 0"),
        (lambda: closed_batch([(1, 1)]).faster(0), "factor is 0"),
        (lambda: closed_batch([(1, 1)]).with_outputs(0), "tokens is 0"),
    ],
)
def test_what_makes_no_workload(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_prompts():
    arrivals = [Arrival(0, 7, 1, "a", 0, (5, 6)), Arrival(0, 3, 1, "b"), Arrival(0, 4, 1, "c", 0, (5,))]
    workload = Workload("w", arrivals, prefix_block_size=3)
    own = [OWN_TOKENS + number for number in range(3)]
    assert workload.prompt_of(0) == [5, 5, 5, 6, 6, 6, own[0]]
    assert workload.prompt_of(1) == [own[1]] * 3
    assert workload.prompt_of(2) == [5, 5, 5, own[2]]


def test_a_prompt_may_end_amid_its_last_prefix_block():
    workload = Workload("w", [Arrival(0, 4, 1, "a", 0, (5, 6))], prefix_block_size=3)
    assert workload.prompt_of(0) == [5, 5, 5, 6]


def test_parts_of_a_workload():
    workload = Workload("w", [Arrival(4 * S, 3, 5, "late"), Arrival(0, 3, 5, "early")])
    assert [a.request_id for a in workload.arrivals] == ["early", "late"]  # in order of arrival, however given
    assert [a.request_id for a in workload.first(1).arrivals] == ["early"]
    assert [a.at_ns for a in workload.faster(2).arrivals] == [0, 2 * S]
    assert {a.output_tokens for a in workload.with_outputs(1).arrivals} == {1}


# ---- traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951691,396,109
2023-11-16 18:16:00,10,1
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 3027, "input_length": 512, "output_length": 9, "hash_ids": [0]}
"""


def read(tmp_path, text: str) -> Workload:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


def test_azures_format(tmp_path):
    workload = read(tmp_path, AZURE)
    assert workload.name == "trace" and workload.num_skipped == 0
    assert workload.arrivals == [
        Arrival(0, 374, 44, "0"), Arrival(4_314_579_100, 396, 109, "1"), Arrival(13_319_410_000, 10, 1, "2"),
    ]  # fmt: skip
    # The release of 2024 names the zone.
    zoned = AZURE.replace(",374", "+00:00,374").replace(",396", "+00:00,396").replace("16:00,", "16:00+00:00,")
    assert read(tmp_path, zoned).arrivals == workload.arrivals


def test_burstgpts_format(tmp_path):
    for text in (BURSTGPT, BURSTGPT.replace("Timestamp,", "\ufeffTimestamp,").replace("\n", "\r\n")):
        workload = read(tmp_path, text)
        assert workload.arrivals == [Arrival(0, 472, 18, "0"), Arrival(113 * S, 417, 276, "1")]
        assert workload.num_skipped == 1  # it failed: no answer


def test_mooncakes_format(tmp_path):
    workload = read(tmp_path, MOONCAKE)
    assert workload.prefix_block_size == 512
    assert workload.arrivals == [Arrival(0, 700, 5, "0", 0, (0, 1)), Arrival(3 * S, 512, 9, "1", 0, (0,))]


def test_our_own_format(tmp_path):
    text = '{"arrival_s": 2, "prompt_tokens": 3, "output_tokens": 4}\n'
    text += '{"arrival_s": 0.25, "prompt_tokens": 9, "output_tokens": 1, "request_id": "x", "priority": -1, '
    text += '"prefix_ids": [3], "prefix_block_size": 8}\n'
    workload = read(tmp_path, text)
    # Times are kept: what we write begins when it says.
    assert workload.arrivals == [Arrival(S // 4, 9, 1, "x", -1, (3,)), Arrival(2 * S, 3, 4, "0")]
    assert workload.prefix_block_size == 8


arrivals = st.builds(
    Arrival, st.integers(0, 10**15), st.integers(1, 10**6), st.integers(1, 10**6),
    st.text(st.characters(exclude_characters="#", exclude_categories=["Cs"])), st.integers(-9, 9),
)  # fmt: skip


@given(st.lists(arrivals, min_size=1, max_size=8), st.data())
def test_what_is_saved_is_read_back(tmp_path_factory, made, data):
    size = data.draw(st.integers(1, 600))
    with_prefix = []
    for arrival in made:
        most = min(3, -(-arrival.prompt_tokens // size))
        ids = data.draw(st.lists(st.integers(0, 99), max_size=most))
        with_prefix.append(arrival._replace(prefix_ids=tuple(ids)))
    workload = Workload("w", with_prefix, size)
    path = tmp_path_factory.mktemp("traces") / "w.jsonl"
    workload.save(path)
    back = read_trace(path)
    assert back.arrivals == workload.arrivals and back.name == "w"
    if any(a.prefix_ids for a in with_prefix):
        assert back.prefix_block_size == size


def line(**changes) -> str:
    row = {"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 4} | changes
    return json.dumps({name: value for name, value in row.items() if value is not None}) + "\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "trace: holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "trace: holds no request"),
        (AZURE.replace("44", "0").replace("109", "0").replace(",1\n", ",0\n"), "holds no request of at least 1"),
        ("a,b\n1,2\n", "line 2: has the fields a, b; known are: TIMESTAMP"),
        ('{"a": 1}\n', "line 1: has the fields a; known are"),
        (AZURE.replace("396", "many"), "line 3: ContextTokens is 'many': use a whole number >= 0"),
        (AZURE.replace("396", "-3"), "line 3: ContextTokens is '-3'"),
        (AZURE.replace("396", "3.5"), "line 3: ContextTokens is '3.5'"),
        (AZURE.replace("396", "nan"), "line 3: ContextTokens is 'nan'"),
        (AZURE.replace("396", "inf"), "line 3: ContextTokens is 'inf'"),
        (AZURE.replace(",396,109", ""), "line 3: ContextTokens is missing"),
        (AZURE.replace(",109", ",109,7"), "line 3: has more columns than the header"),
        (AZURE.replace("2023-11-16 18:15:50.9951691", "noon"), "line 3: TIMESTAMP is 'noon': use a time such as"),
        (AZURE.replace("18:15:50.9951691", "18:15:50.99x"), "line 3: TIMESTAMP is"),
        (BURSTGPT.replace("118", "later"), "line 4: Timestamp is 'later': use a number of seconds"),
        (BURSTGPT.replace("118", "-1"), "line 4: Timestamp is '-1'"),
        (MOONCAKE.replace("512,", '"all",'), "line 3: input_length is 'all'"),
        (MOONCAKE.replace("[0]", "[0, 1]"), "line 3: hash_ids has 2 ids of 512 tokens for a prompt of 512"),
        (MOONCAKE.replace("[0]", '["x"]'), "line 3: hash_ids is \\['x'\\]: use a list of whole numbers"),
        (MOONCAKE.replace("[0]", "[true]"), "line 3: hash_ids is \\[True\\]"),
        (MOONCAKE.replace("}\n\n", "\n\n"), "line 1: is not JSON"),
        (MOONCAKE + "[1]\n", "line 4: is '\\[1\\]', not an object"),
        (line() + line(arrival_s=None), "line 2: arrival_s is missing"),
        (line() + line(arrival_s=True), "line 2: arrival_s is True"),
        (line() + line(arrival_s=1e300), "line 2: arrival_s is 1e\\+300"),
        (line() + line(output_tokens=False), "line 2: output_tokens is False"),
        (line() + line(request_id="a#1"), "line 2: request_id is 'a#1': use a string without '#'"),
        (line() + line(priority=1.5), "line 2: priority is 1.5: use a whole number"),
        (line(prefix_ids=[1], prefix_block_size=4) + line(prefix_ids=[1], prefix_block_size=8),
         "line 2: prefix_block_size is 8: it is 4 in the lines before"),
    ],
)  # fmt: skip
def test_a_bad_trace_names_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="nowhere.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text file"):
        read_trace(tmp_path / "binary")
