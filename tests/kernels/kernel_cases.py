"""Paged sequences with traps around them, and what attention over them must give.

Every slot that no sequence owns holds NaN, a block of NaN lies behind K and behind V, and the tables' tails hold -1.
The tables are no wider than the longest sequence needs. q and out are slices of wider tensors.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvlab.model.quantize import quantize
from kvlab_kernels import launch
from kvlab_kernels.gather import decode_reference
from kvlab_kernels.varlen import varlen_reference

DEVICE = "cpu" if launch.INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SENTINEL = 7.0


class Paged(NamedTuple):
    q: Tensor  # [rows, H, D]
    kv: Tensor  # [2, num_blocks, block_size, Hkv, D]
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor  # one row a sequence if no query_lens were given


def paged(
    seq_lens, query_lens=None, *, group=2, num_kv_heads=2, head_dim=32, block_size=4, dtype=torch.float32, seed=0,
    scale=1.0, shared=0, padding=0, spare=1,
) -> Paged:  # fmt: skip
    """Random K and V for sequences of these lengths. The first `shared` blocks of all sequences are the same ones.

    scale: of q, to make scores large. padding: rows of q behind the last sequence's. spare: blocks that nobody owns.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    query_lens = [1] * len(seq_lens) if query_lens is None else query_lens
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(needed) + spare
    free = torch.randperm(num_blocks, generator=generator).tolist()
    common = [free.pop() for _ in range(shared)]
    tables = torch.full((len(seq_lens), max(needed, default=0)), -1, dtype=torch.int32)
    guarded = torch.full((2, num_blocks + 1, block_size, num_kv_heads, head_dim), torch.nan)
    kv = guarded[:, :num_blocks]
    for row, (seq_len, blocks) in enumerate(zip(seq_lens, needed, strict=True)):
        own = common[:blocks] + [free.pop() for _ in range(blocks - len(common[:blocks]))]
        tables[row, :blocks] = torch.tensor(own, dtype=torch.int32)
        for position in range(seq_len):
            slot = kv[:, own[position // block_size], position % block_size]
            if slot.isnan().any():  # a shared one is written once
                slot[:] = randn(2, num_kv_heads, head_dim)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    rows, heads = int(starts[-1]) + padding, group * num_kv_heads
    q = randn(rows, heads + 3, head_dim + 5)[:, 1 : heads + 1, :head_dim] * scale
    wide_q = torch.full((rows, heads + 3, head_dim + 5), torch.nan, dtype=dtype, device=DEVICE)
    wide_q[:, 1 : heads + 1, :head_dim] = q
    kv = guarded.to(dtype).to(DEVICE)[:, :num_blocks]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    return Paged(wide_q[:, 1 : heads + 1, :head_dim], kv, tables.to(DEVICE), lens, starts.to(DEVICE))


def in_8_bits(case: Paged, dtype=torch.int8) -> tuple[Paged, Tensor]:
    """The case with its cache quantised, and the scales. Where no sequence owns a slot, and behind the last block:
    127 with a scale of NaN."""
    num_blocks = case.kv.shape[1]
    unowned = case.kv.float().isnan().any(-1)
    numbers, scales = quantize(case.kv.float(), dtype)
    numbers = torch.where(unowned[..., None], 127.0, numbers.float()).to(dtype)
    kv = torch.full((2, num_blocks + 1, *case.kv.shape[2:]), 127.0, device=DEVICE).to(dtype)[:, :num_blocks]
    guarded = torch.full((2, num_blocks + 1, *scales.shape[2:]), torch.nan, device=DEVICE)[:, :num_blocks]
    return case._replace(kv=kv.copy_(numbers)), guarded.copy_(torch.where(unowned, torch.nan, scales))


def sheltered(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, the tensor that it lies in): sentinels all around."""
    rows, heads, head_dim = q.shape
    wide = torch.full((rows + 2, heads + 1, head_dim + 3), SENTINEL, dtype=q.dtype, device=q.device)
    return wide[1:-1, :heads, :head_dim], wide


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def close(got: Tensor, want: Tensor) -> None:
    error = (got.float() - want.float()).abs().amax().item() if got.numel() else 0.0
    assert error <= TOLERANCE[got.dtype], f"off by {error}"  # NaN is not <= anything


def decode(attention, case: Paged, **options) -> Tensor:
    """Run a decode and check it, and that it wrote its own output and nothing else."""
    out, wide = sheltered(case.q)
    kv_before, tables_before = case.kv.clone(), case.block_tables.clone()
    got = attention(case.q, case.kv, case.block_tables, case.seq_lens, out=out, **options)
    assert got is out
    close(out, decode_reference(case.q, case.kv, case.block_tables, case.seq_lens, scale=options.get("scale")))
    out_copy = out.clone()
    out.fill_(SENTINEL)
    assert (wide == SENTINEL).all(), "wrote outside of out"
    assert torch.equal(bits(case.kv), bits(kv_before)) and torch.equal(case.block_tables, tables_before)
    return out_copy


def varlen(attention, case: Paged, **options) -> Tensor:
    """Run a flat batch and check it; rows of padding must stay as they were."""
    out, wide = sheltered(case.q)
    kv_before = case.kv.clone()
    args = (case.q, case.kv, case.block_tables, case.seq_lens, case.query_start_loc)
    assert attention(*args, out=out, **options) is out
    real = int(case.query_start_loc[-1])
    close(out[:real], varlen_reference(*args, scale=options.get("scale"))[:real])
    out_copy = out[:real].clone()
    out[:real].fill_(SENTINEL)
    assert (wide == SENTINEL).all(), "wrote outside of the rows that sequences own"
    assert torch.equal(bits(case.kv), bits(kv_before))
    return out_copy


def far_apart(seq_lens, query_lens=None, **shape) -> Paged:
    """`paged`, with at least three blocks so far apart that block id times stride passes 2^31 at the last one.

    4 GiB of address space, of which only the blocks are touched. Skips the test where that is refused.
    """
    near = paged(seq_lens, query_lens, dtype=torch.float16, spare=0, **shape)
    num_blocks, inner = near.kv.shape[1], near.kv[0, 0].numel()
    stride = -(-(1 << 31) // (num_blocks - 1))
    assert num_blocks >= 3, "a stride of 2^31 would be passed as 64 bits and hide a product of 32"
    try:
        memory = torch.empty((num_blocks - 1) * stride + 2 * inner, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("4 GiB of address space are refused")
    kv = memory.as_strided(near.kv.shape, (inner, stride, *near.kv.stride()[2:]))
    return near._replace(kv=kv.copy_(near.kv))
