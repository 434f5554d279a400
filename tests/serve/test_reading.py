"""Bytes and metrics, as a client reads them: beside Python's codec, and beside the server's own metrics."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvlab.serve.reading import EventReader, between, buckets, quantile, samples, whole_bytes

TEXTS = st.text(alphabet=st.sampled_from("ab é块表🙂\u2028\x85"), max_size=12)


@given(TEXTS, st.integers(0, 60))
def test_whole_bytes_are_those_that_pythons_codec_gives_out(text, end):
    data = text.encode()[:end]
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert whole_bytes(data) == len(decoder.decode(data).encode())


@given(
    st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=4),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b": waiting", b"event: x", b"", b"id", b"datax: 1"]),
)
def test_events_do_not_depend_on_how_the_bytes_are_cut(events, cuts, end, other):
    lines = [line for event in events
             for line in [other, *(b"data: " + part.encode() for part in event), b""]]  # fmt: skip
    data = b"".join(line + end for line in lines)
    cuts = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    reader = EventReader()
    found = [event for a, b in pairwise(cuts) for event in reader.feed(data[a:b])]
    assert found == ["\n".join(event) for event in events]


def test_an_event_without_its_empty_line_is_none_yet():
    reader = EventReader()
    assert reader.feed(b"data:x\n") == []
    assert reader.feed(b"\ndata: {}\n\ndata") == ["x", "{}"]


def scrape(values, bounds):
    registry = CollectorRegistry()
    histogram = Histogram("vllm:t", "seconds", ("engine",), buckets=bounds, registry=registry).labels("0")
    for value in values:
        histogram.observe(value)
    return samples(generate_latest(registry).decode())


@given(st.lists(st.floats(0, 9), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values, q):
    bounds = (0.5, 1.0, 2.0, 4.0, 8.0)
    found = quantile(q, buckets(scrape(values, bounds), "vllm:t"))
    rank = q * len(values)
    true = sorted(values)[min(len(values), -(-rank // 1).__int__()) - 1]
    edges = [0.0, *bounds]
    upper = next((b for b in bounds if true <= b), None)
    if upper is None:
        assert found == 8.0
    else:
        assert edges[edges.index(upper) - 1] <= found <= upper


@pytest.mark.parametrize(
    ("q", "expected"), [(0.5, 1.5), (0.95, 3.6), (1.0, 4.0), (0.25, 1.0), (0.0, 0.0), (0.125, 0.5)]
)
def test_quantiles_by_hand(q, expected):
    table = [(1.0, 5.0), (2.0, 15.0), (4.0, 20.0), (float("inf"), 20.0)]
    assert quantile(q, table) == pytest.approx(expected)


def test_no_values_have_no_quantile_and_what_is_above_all_bounds_is_said_to_be_the_last():
    assert quantile(0.5, [(1.0, 0.0), (float("inf"), 0.0)]) is None
    assert quantile(0.9, [(1.0, 1.0), (float("inf"), 10.0)]) == 1.0


def test_between_two_scrapes_only_what_has_risen_counts():
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum",
             "prefix_cache_queries_total", "prefix_cache_hits_total")  # fmt: skip
    before = dict(zip(("vllm:" + name for name in names), (100.0, 10.0, 50.0, 400.0, 300.0), strict=True))
    after = dict(zip(before, (180.0, 14.0, 51.0, 500.0, 320.0), strict=True))
    assert between(before, after, 4.0) == (20.0, 0.25, 0.2)
    assert between(before, before, 4.0) == (0.0, None, None)
