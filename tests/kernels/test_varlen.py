"""Chunks and decodes in one launch, against the gathered oracle and against the engine's own loops."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, Paged, close, decode, far_apart, paged, varlen

from kvlab_kernels import launch
from kvlab_kernels.cache_write import reshape_and_cache
from kvlab_kernels.configs import VarlenConfig
from kvlab_kernels.gqa_packed import gqa_packed_attention
from kvlab_kernels.varlen import varlen_attention, varlen_reference

SMALL = VarlenConfig(16, 16, 4, 2)  # 8 positions in a query block for a group of 2
attend = partial(varlen_attention, config=SMALL)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([1, 17, 40], [1, 1, 1]),  # decodes
        ([1, 8, 17], [1, 8, 17]),  # whole prompts, nothing computed before
        ([40, 21], [9, 13]),  # chunks behind a context, no multiple of a query block
        ([40, 30, 8, 19], [1, 24, 8, 3]),  # all together
        ([5, 30, 0, 7], [0, 4, 0, 1]),  # sequences without rows
        ([9], [8]),
        ([24], [16]),
    ],
)
def test_flat_batches(seq_lens, query_lens):
    varlen(attend, paged(seq_lens, query_lens))


def test_rows_of_padding_are_left_alone():
    varlen(attend, paged([9, 4], [3, 1], padding=11))
    varlen(attend, paged([9, 4], [0, 0], padding=5))


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
def test_groups(group):
    varlen(attend, paged([19], [6], group=group))


def test_a_group_larger_than_the_smallest_block():
    varlen(varlen_attention, paged([9], [4], group=28))
    with pytest.raises(ValueError, match="block_m is 16: a position has 28 rows"):
        varlen_attention(*paged([9], [4], group=28), config=SMALL)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_head_dims(head_dim):
    varlen(attend, paged([19, 6], [6, 1], head_dim=head_dim))


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_block_sizes(block_size):
    varlen(attend, paged([39, 6], [6, 1], block_size=block_size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    from kvlab_kernels import interpreter

    if dtype == torch.bfloat16 and launch.INTERPRETED and not interpreter.BF16_IS_RIGHT:
        pytest.skip("the interpreter is wrong on bf16 in this version of Triton")
    varlen(attend, paged([39, 40], [1, 12], dtype=dtype))


def test_large_scores_and_the_scale():
    varlen(attend, paged([39], [20], scale=80.0))
    varlen(attend, paged([39], [20]), scale=0.3)


def test_sequences_share_blocks():
    varlen(attend, paged([19, 30], [3, 9], shared=2))


def test_the_sizes_of_the_table():
    varlen(varlen_attention, paged([70, 9], [66, 1]), max_query_len=66)
    varlen(varlen_attention, paged([70, 9], [66, 1]), max_query_len=1)


def test_a_decode_is_a_chunk_of_one_row():
    case = paged([40, 7])
    close(attend(*case), decode(gqa_packed_attention, case))


def test_offsets_beyond_31_bits():
    case = far_apart([8, 3], [5, 1], block_size=4, num_kv_heads=1, head_dim=16)
    close(attend(*case), varlen_reference(*case))


def test_chunks_equal_one_prompt():
    """9 rows after 7 give the rows that 16 at once give."""
    whole = paged([16], [16])
    at_once = varlen(attend, whole)
    pieces = []
    for start, end in ((0, 7), (7, 16)):
        lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        pieces.append(attend(whole.q[start:end], whole.kv, whole.block_tables, lens, starts))
    close(torch.cat(pieces), at_once)


def test_written_then_read_equals_plain_causal_attention():
    """Three steps of a sequence through cache write and attention, against PyTorch on what was never paged."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(20, heads, 32, generator=generator).to(DEVICE) for heads in (4, 2, 2))
    kv = torch.full((2, 8, 4, 2, 32), torch.nan, device=DEVICE)
    table = torch.tensor([[6, 1, 3, 7, 2]], dtype=torch.int32, device=DEVICE)
    outs = []
    for start, end in ((0, 13), (13, 19), (19, 20)):
        positions = torch.arange(start, end, device=DEVICE)
        slots = table[0, positions // 4].long() * 4 + positions % 4
        reshape_and_cache(k[start:end], v[start:end], kv, slots)
        lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        outs.append(attend(q[start:end], kv, table, lens, starts))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    close(torch.cat(outs), plain)


def test_the_engines_loops_say_the_same():
    from kvlab.model.attention import naive_paged_attention
    from kvlab.model.batch import flat_batch

    case = paged([10, 21, 8], [1, 12, 8])
    tables = [[block for block in row if block >= 0] for row in case.block_tables.tolist()]
    chunks = zip((1, 12, 8), (9, 9, 0), tables, strict=True)
    batch = flat_batch([([0] * n, start, table, True) for n, start, table in chunks], 4, DEVICE)
    got = attend(case.q, case.kv, batch.block_tables, batch.seq_lens, batch.query_start_loc)
    close(got, naive_paged_attention(case.q, case.kv, batch))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(data):
    draw = data.draw
    seqs = draw(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 20)), min_size=1, max_size=4))
    case = paged(
        [context + query for context, query in seqs],
        [query for _, query in seqs],
        group=draw(st.integers(1, 8)),
        num_kv_heads=draw(st.integers(1, 2)),
        block_size=draw(st.integers(1, 20)),
        padding=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )
    varlen(attend, case)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([0, 3]), "give int32"),
        (torch.tensor([0, 3, 4, 5], dtype=torch.int32), r"give int32 \[3\]"),
        (torch.tensor([0, 0, 3, 0, 4], dtype=torch.int32)[::2], "make it contiguous"),
        (torch.tensor([0, 3, 9], dtype=torch.int32), "at most the 4 rows"),
        (torch.tensor([0, 3, 2], dtype=torch.int32), "must rise"),
        (torch.tensor([1, 3, 4], dtype=torch.int32), "rise from 0"),
        (torch.tensor([0, 0, 4], dtype=torch.int32), "sequence 1 has 4 rows of q but length 2"),
    ],
)
def test_starts_that_do_not_fit_are_refused(starts, message):
    case = Paged(*(x.cpu() for x in paged([9, 2], [3, 1])))  # where values are checked too
    with pytest.raises(ValueError, match=message):
        varlen_attention(*case[:4], starts)
