"""The sampler against a plain-Python one that follows the definition, token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine import sampler as module
from kvlab.engine.logits import Adjustment
from kvlab.engine.sampler import Sampler, SampleRow

sampler = Sampler()
SLACK = 1e-12  # boundaries nearer than this may fall either way in floating point


def possible_tokens(logits: list[float], r: SampleRow) -> set[int]:
    """All tokens that exact arithmetic, moved by SLACK at each boundary, can give."""
    logits = [-math.inf if i in (r.adjustment.banned if r.adjustment else ()) else x for i, x in enumerate(logits)]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if r.temperature == 0:
        return {ranked[0]}
    highest = logits[ranked[0]]
    weight = [math.exp((x - highest) / r.temperature) for x in logits]
    weight = [w if w >= r.min_p else 0.0 for w in weight]
    if r.top_k > 0:
        ranked = ranked[: r.top_k]
    total, below, counts = math.fsum(weight[i] for i in ranked), 0.0, set()
    for count, i in enumerate(ranked, start=1):
        if r.top_p < 1 and below < (r.top_p + SLACK) * total:
            below += weight[i]
            if below >= (r.top_p - SLACK) * total or count == len(ranked):
                counts.add(count)
    tokens = set()
    for count in counts or {len(ranked)}:
        kept = sorted(ranked[:count])
        total, below = math.fsum(weight[i] for i in kept), 0.0
        for i in kept:
            low, high = below / total - SLACK, (below + weight[i]) / total + SLACK
            if weight[i] > 0 and low <= r.uniform < high:
                tokens.add(i)
            below += weight[i]
        if r.uniform > 1 - SLACK:
            tokens.add(max(i for i in kept if weight[i] > 0))
    return tokens


# Few distinct values, so that ties are common, and some that are far away.
LOGIT = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([-math.inf, -1000.0, 1000.0, 0.1, 0.2]))
UNIFORM = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 0.9999999999, 1 - 2**-53]))


@st.composite
def problems(draw):
    vocab = draw(st.integers(1, 12))
    logits = draw(st.lists(st.lists(LOGIT, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.integers(0, len(logits) - 1))
        banned = draw(st.sets(st.integers(0, vocab - 1), max_size=2))
        if all(i in banned or x == -math.inf for i, x in enumerate(logits[index])):
            logits[index][0], banned = 0.0, set()
        rows.append(
            SampleRow(
                row=index,
                temperature=draw(st.sampled_from([0.0, 0.01, 0.5, 1.0, 5.0])),
                top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 100])),
                top_p=draw(st.one_of(st.floats(1e-9, 1), st.sampled_from([1.0, 0.5, 0.25]))),
                min_p=draw(st.sampled_from([0.0, 0.0, 0.013, 0.3, 1.0])),
                uniform=draw(UNIFORM),
                adjustment=Adjustment(banned=tuple(banned)),
            )
        )
    return logits, rows


@given(problems(), st.sampled_from([1, 2, 128]), st.sampled_from([1, 9, module.SAMPLED_AT_ONCE]))
@settings(max_examples=250, deadline=None)
def test_every_token_is_one_the_definition_allows(problem, first_look, at_once):
    logits, rows = problem
    originals = module.FIRST_LOOK, module.SAMPLED_AT_ONCE
    module.FIRST_LOOK, module.SAMPLED_AT_ONCE = first_look, at_once
    try:
        tokens = sampler(torch.tensor(logits), rows)
        for row, token in zip(rows, tokens, strict=True):
            assert type(token) is int
            assert token in possible_tokens(logits[row.row], row)
            assert sampler(torch.tensor(logits), [row]) == [token]  # the other rows do not matter
    finally:
        module.FIRST_LOOK, module.SAMPLED_AT_ONCE = originals


@pytest.mark.parametrize("options", [{}, dict(top_k=7), dict(top_p=0.6), dict(top_k=50, top_p=0.9), dict(top_p=1e-9)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_frequencies_are_the_probabilities(temperature, options):
    """Evenly spread uniforms must give each token its share, up to one draw."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 2
    draws = 2000
    rows = [SampleRow(0, temperature, uniform=(i + 0.5) / draws, **options) for i in range(draws)]
    counts = torch.bincount(torch.tensor(sampler(logits, rows)), minlength=60)
    scaled, order = (logits[0].double() / temperature).sort(descending=True)
    p = scaled.softmax(0)
    if "top_k" in options:
        p[options["top_k"] :] = 0
        p /= p.sum()
    if "top_p" in options:
        p[p.cumsum(0) - p >= options["top_p"]] = 0
        p /= p.sum()
    assert (counts[order] - p * draws).abs().max() <= 1
    assert ((counts[order] > 0) <= (p > 0)).all()


def test_a_large_vocabulary_with_ties_at_the_boundary():
    """Top-k and top-p cut through a long plateau of equals: the lowest ids stay."""
    logits = torch.zeros(1, 5000)
    logits[0, 4321] = 1.0
    kept = {sampler(logits, [SampleRow(0, 1.0, top_k=10, uniform=u / 100)])[0] for u in range(100)}
    assert kept == {*range(9), 4321}
    share = (math.e + 200) / (math.e + 4999)  # the first rank and 200 of the equals
    tokens = sampler(logits, [SampleRow(0, 1.0, top_p=share - 1e-6, uniform=u / 2000) for u in range(2000)])
    assert set(tokens) == {*range(200), 4321}


@pytest.mark.parametrize("top_p, kept", [(0.25, {0}), (0.2501, {0, 1}), (0.5, {0, 1}), (0.75, {0, 1, 2})])
def test_top_p_stops_where_the_share_is_reached(top_p, kept):
    """Four equals: shares of exactly 1/4, so that the boundary is exact."""
    rows = [SampleRow(0, 1.0, top_p=top_p, uniform=u / 64) for u in range(64)]
    assert set(sampler(torch.zeros(1, 4), rows)) == kept


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -math.inf, 0.0, 5.0]])
    assert sampler(logits, [SampleRow(0), SampleRow(1)]) == [1, 0]
    assert sampler(logits, [SampleRow(1), SampleRow(0), SampleRow(1)]) == [0, 1, 0]
    assert sampler(logits, [SampleRow(0, adjustment=Adjustment(banned=(1, 2)))]) == [3]


def test_one_row_of_logits_serves_several_samples():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    rows = [SampleRow(0, 1.0, uniform=u) for u in (0.1, 0.3, 0.6, 0.9)]
    assert sampler(logits, rows) == [0, 1, 2, 3]


def test_bans_touch_only_their_own_sample():
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    before = logits.clone()
    banned = [Adjustment(banned=ids) for ids in ((1,), (1, 2, 77, -1))]
    rows = [SampleRow(0), *(SampleRow(0, adjustment=adjustment) for adjustment in banned)]
    assert sampler(logits, rows) == [1, 2, 0]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("uniform", [0.0, 0.9999999999, 1 - 2**-53])
def test_edges_of_the_uniform_stay_inside(uniform):
    logits = torch.tensor([[-math.inf, 0.0, 1000.0, 999.0, -1000.0, -math.inf]])
    for options in ({}, dict(top_k=4), dict(top_p=0.999)):
        token = sampler(logits, [SampleRow(0, 1.0, uniform=uniform, **options)])[0]
        assert token == (2 if uniform == 0 else 3)
    assert sampler(torch.zeros(1, 1), [SampleRow(0, 1.0, uniform=uniform)]) == [0]


def test_no_rows():
    assert sampler(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_have_no_token_are_named(temperature):
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="row 1 of the logits has nan"):
        sampler(logits, [SampleRow(0, temperature), SampleRow(1, temperature)])
    with pytest.raises(ValueError, match="row 2 of the logits has -inf.*all tokens are banned"):
        sampler(logits, [SampleRow(2, temperature, adjustment=Adjustment(banned=(0, 1)))])
