"""Split-KV: empty splits, stale workspaces, the merge, results that do not depend on the batch, the split rule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICE, close, decode, paged

from kvlab_kernels.configs import DecodeConfig
from kvlab_kernels.gqa_packed import gqa_packed_attention
from kvlab_kernels.split_kv import (
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    Workspace,
    choose_num_splits,
    make_workspace,
    merge_reference,
    split_kv_attention,
)

SMALL = DecodeConfig(16, 4, 2)


def stale(num_seqs, num_heads, num_splits, head_dim=32) -> Workspace:
    workspace = make_workspace(num_seqs, num_heads, num_splits, head_dim, DEVICE)
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    return workspace


@pytest.mark.parametrize("num_splits", [2, 5, 17, 40])
def test_empty_splits_in_a_stale_workspace(num_splits):
    decode(
        split_kv_attention, paged([0, 1, 16, 33, 50]), num_splits=num_splits, config=SMALL,
        workspace=stale(5, 4, num_splits),
    )  # fmt: skip


def test_a_workspace_may_be_larger():
    decode(split_kv_attention, paged([1, 50]), num_splits=3, config=SMALL, workspace=stale(4, 4, 9))


@pytest.mark.parametrize("shape", [(1, 4, 3, 32), (2, 8, 3, 32), (2, 4, 2, 32), (2, 4, 3, 64)])
def test_a_workspace_that_is_too_small_is_refused(shape):
    case = paged([1, 50])
    with pytest.raises(ValueError, match=r"make_workspace\(2, 4, 3, 32, device\) or more"):
        split_kv_attention(*case[:4], num_splits=3, workspace=make_workspace(*shape, DEVICE))


def test_splits_and_the_merge_equal_one_softmax():
    """What the splits leave in the workspace is each one's own attention and log-sum-exp."""
    case, workspace = paged([50]), stale(1, 4, 2)
    out = decode(split_kv_attention, case, num_splits=2, config=SMALL, workspace=workspace)
    close(out, merge_reference(workspace.partial, workspace.lse).float())
    first = case._replace(seq_lens=torch.tensor([32], dtype=torch.int32, device=DEVICE))  # two tiles of the four
    close(workspace.partial[:, :, 0], gqa_packed_attention(*first[:4], config=SMALL))


def test_one_split_equals_the_kernel_before_it():
    case = paged([50, 3])
    assert torch.equal(
        split_kv_attention(*case[:4], num_splits=1, config=SMALL), gqa_packed_attention(*case[:4], config=SMALL)
    )


@pytest.mark.parametrize("split_tokens", [8, 16, 40])
def test_with_fixed_cuts_a_result_is_the_same_in_every_batch(split_tokens):
    """Alone, beside a longer one, and with another plan: not a bit differs."""
    together = paged([37, 90, 5], dtype=torch.float16)
    options = {"split_tokens": split_tokens, "config": SMALL}
    whole = decode(split_kv_attention, together, **options)
    for row, seq_len in enumerate((37, 90, 5)):
        width = -(-seq_len // 4)
        for plan in (seq_len, 90, 200):
            alone = split_kv_attention(
                together.q[row : row + 1], together.kv, together.block_tables[row : row + 1, :width],
                together.seq_lens[row : row + 1], max_seq_len=plan, **options,
            )  # fmt: skip
            assert torch.equal(alone[0], whole[row])


def test_without_fixed_cuts_it_is_not():
    """Else the test above could not fail."""
    case = paged([90], head_dim=64)
    one, six = (split_kv_attention(*case[:4], num_splits=n, config=SMALL) for n in (1, 6))
    assert not torch.equal(one, six)


def test_a_sequence_longer_than_planned_is_still_right():
    decode(split_kv_attention, paged([50]), split_tokens=16, max_seq_len=20, config=SMALL)


def test_it_chooses_for_itself():
    decode(split_kv_attention, paged([600], num_kv_heads=1, group=1, block_size=16), config=SMALL)


@pytest.mark.parametrize(
    ("batch_size", "max_seq_len", "splits"),
    [
        (1, 100, 1),
        (1, 511, 1),
        (1, 512, 2),
        (1, 8192, 32),
        (1, 131072, 64),
        (16, 8192, 8),
        (66, 8192, 1),
        (256, 8192, 1),
    ],
)
def test_splits_for_an_h200(batch_size, max_seq_len, splits):
    """132 processors, 4 KV heads."""
    assert choose_num_splits(batch_size, 4, max_seq_len, 132) == splits


@given(
    st.integers(1, 512), st.integers(1, 32), st.integers(1, 1 << 18), st.sampled_from([24, 108, 128, 132]), st.data()
)
def test_the_split_rule(batch_size, num_kv_heads, max_seq_len, sms, data):
    splits = choose_num_splits(batch_size, num_kv_heads, max_seq_len, sms)
    programs = batch_size * num_kv_heads * splits
    assert 1 <= splits <= MAX_SPLITS and splits & (splits - 1) == 0
    assert splits == 1 or programs < 4 * sms  # not more than are needed
    assert splits == 1 or max_seq_len // splits >= MIN_SPLIT_TOKENS
    enough = programs >= 2 * sms or splits == MAX_SPLITS or max_seq_len < 2 * splits * MIN_SPLIT_TOKENS
    assert enough
    larger = data.draw(st.integers(batch_size, 1024))
    assert choose_num_splits(larger, num_kv_heads, max_seq_len, sms) <= splits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 2, "split_tokens": 16}, "give one of them"),
        ({"num_splits": 0}, "num_splits is 0"),
        ({"split_tokens": 0}, "split_tokens is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        split_kv_attention(*paged([5])[:4], **options)
