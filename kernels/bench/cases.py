"""Paged sequences of any shape, for checks and for times."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.model.quantize import quantize


class Shape(NamedTuple):
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


QWEN = Shape(28, 4, 128)  # Qwen2.5-7B
TOY = Shape(4, 2, 32)


class Paged(NamedTuple):
    """Arguments of the launchers; query_start_loc only counts where a sequence has several rows."""

    q: Tensor  # [rows, H, D]
    kv: Tensor  # [2, num_blocks, block_size, Hkv, D]
    block_tables: Tensor  # int32 [S, W]
    seq_lens: Tensor  # int32 [S]
    query_start_loc: Tensor  # int32 [S + 1]
    scales: Tensor | None = None  # fp32 [2, num_blocks, block_size, Hkv] of K and V in 8 bits

    @property
    def decode(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.kv, self.block_tables, self.seq_lens


def paged(
    shape: Shape,
    seq_lens: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    query_lens: Sequence[int] | None = None,
    shuffled: bool = True,
    seed: int = 0,
) -> Paged:
    """Sequences of these lengths over blocks in random order, or one after the other; normal numbers everywhere.

    query_lens: rows of q for each; one, a decode, if None.
    """
    generator = torch.Generator(device).manual_seed(seed)
    pages = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(pages)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)) if shuffled else None
    ids = (torch.arange(num_blocks) if order is None else order).to(torch.int32) + 1  # block 0 is the null block
    tables = torch.zeros(len(seq_lens), max(pages), dtype=torch.int32)
    first = 0
    for row, count in enumerate(pages):
        tables[row, :count] = ids[first : first + count]
        first += count
    query_lens = query_lens or [1] * len(seq_lens)
    kv_shape = (2, num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
    q_shape = (sum(query_lens), shape.num_heads, shape.head_dim)
    q, kv = (torch.randn(size, generator=generator, device=device, dtype=dtype) for size in (q_shape, kv_shape))
    small = (torch.tensor(x, dtype=torch.int32, device=device) for x in (seq_lens, [0, *accumulate(query_lens)]))
    return Paged(q, kv, tables.to(device), *small)


def in_8_bits(case: Paged, dtype: torch.dtype) -> Paged:
    """The same with K and V quantised to int8 or float8_e4m3fn."""
    kv, scales = quantize(case.kv, dtype)
    return case._replace(kv=kv, scales=scales)


def useful_bytes(case: Paged) -> int:
    """K and V of all tokens, once, with their scales: what a decode must read at the least."""
    return int(case.seq_lens.sum()) * bytes_per_token(case)


def bytes_per_token(case: Paged) -> int:
    """Of K and V, with their scales, in this layer."""
    of_a_head = case.kv.shape[4] * case.kv.element_size() + (0 if case.scales is None else case.scales.element_size())
    return 2 * case.kv.shape[3] * of_a_head
