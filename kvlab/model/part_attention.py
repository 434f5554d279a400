"""Attention by somebody's own functions: a student's kernel of labs 10 and 11, or lab 12's in torch.

    the write of K and V      TorchAttention
    decodes                   attention(q, keys, values, block_tables, seq_lens) -> out, NumPy arrays; on a CPU
    all else                  attend(q, kv, block_table, seq_len) -> out, torch tensors, one sequence at a time

Both read the pages where they lie in the engine's own memory. What is not given is TorchAttention's, and `attend` alone
has the decodes too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.blocks import cdiv
from kvlab.model.attention import TorchAttention, TorchMetadata
from kvlab.model.batch import FlatBatch
from kvlab.model.kv_cache import KVCache

DTYPES = (torch.float32, torch.float16)  # NumPy has no bfloat16


@dataclass
class Sequence:
    """Rows start:end of the step, attending over the pages of their sequence."""

    start: int
    end: int
    block_table: list[int]
    seq_len: int


@dataclass
class PartMetadata:
    inner: TorchMetadata
    batch: FlatBatch
    num_decodes: int  # sequences for `attention`
    sequences: list[Sequence]  # for `attend`


class PartAttention:
    """The backend of two functions, of which one may be None.

    attention: (q [n, H, D], keys and values [blocks, block_size, Hkv, D], int32 tables [n, W] and lengths [n]).
    attend: (q [n, H, D], kv [2, blocks, block_size, Hkv, D], list of block ids, length), see kvlab.model.plain.
    """

    def __init__(self, attention: Callable | None = None, attend: Callable | None = None):
        self.attention, self.attend_one, self.inner = attention, attend, TorchAttention()

    def check(self, kv_cache: KVCache) -> None:
        """ValueError if NumPy cannot look at `kv_cache` and must."""
        if self.attention is not None and (kv_cache.device.type != "cpu" or kv_cache.dtype not in DTYPES):
            raise ValueError(
                f"the part `attention` works on NumPy arrays, and K and V are {kv_cache.dtype} on {kv_cache.device}: "
                f"use device='cpu' and kv_cache_dtype='float32'"
            )

    def plan(self, batch: FlatBatch, kv_cache: KVCache) -> PartMetadata:
        num_decodes, sequences = batch.num_decodes if self.attention is not None else 0, []
        if self.attend_one is not None:
            starts, seq_lens, tables = (x.tolist() for x in (batch.query_start_loc, batch.seq_lens, batch.block_tables))
            for i in range(num_decodes, len(seq_lens)):
                table = tables[i][: cdiv(seq_lens[i], kv_cache.block_size)]
                sequences.append(Sequence(starts[i], starts[i + 1], table, seq_lens[i]))
        return PartMetadata(self.inner.plan(batch, kv_cache), batch, num_decodes, sequences)

    def write(self, k: Tensor, v: Tensor, layer_index: int, metadata: PartMetadata) -> None:
        self.inner.write(k, v, layer_index, metadata.inner)

    def attend(self, q: Tensor, layer_index: int, metadata: PartMetadata) -> Tensor:
        kv_cache, batch, n = metadata.inner.kv_cache, metadata.batch, metadata.num_decodes
        if self.attend_one is None:
            out = self.inner.attend(q, layer_index, metadata.inner)  # decodes too, which are then written over
        else:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            kv = kv_cache.layer(layer_index, q.dtype)  # a copy of the layer where K and V are stored otherwise
            for s in metadata.sequences:
                out[s.start : s.end] = self.attend_one(q[s.start : s.end], kv, s.block_table, s.seq_len)
        if n:
            kv = kv_cache.layers[layer_index]
            tables, lens = batch.block_tables[:n], batch.seq_lens[:n]
            arrays = (x.detach().contiguous().numpy() for x in (q[:n].to(kv.dtype), kv[0], kv[1], tables, lens))
            out[:n] = torch.from_numpy(self.attention(*arrays)).to(q.dtype)
        return out
