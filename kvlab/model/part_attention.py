"""Attention by somebody's own function, such as a student's kernel of lab 10: it computes the decodes, on a CPU.

    the write of K and V, and prompt chunks     TorchAttention
    decodes                                     function(q, keys, values, block_tables, seq_lens) -> out, NumPy arrays

The arrays are views of the engine's own memory: the function reads the pages where they lie.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.model.attention import TorchAttention, TorchMetadata
from kvlab.model.batch import FlatBatch
from kvlab.model.kv_cache import KVCache

DTYPES = (torch.float32, torch.float16)  # NumPy has no bfloat16


@dataclass
class PartMetadata:
    inner: TorchMetadata
    batch: FlatBatch


class PartAttention:
    """The backend of function(q [n, H, D], keys and values [blocks, block_size, Hkv, D], int32 tables and lengths)."""

    def __init__(self, function: Callable):
        self.function, self.inner = function, TorchAttention()

    def check(self, kv_cache: KVCache) -> None:
        """ValueError if NumPy cannot look at `kv_cache`."""
        if kv_cache.device.type != "cpu" or kv_cache.dtype not in DTYPES:
            raise ValueError(
                f"the part `attention` works on NumPy arrays, and K and V are {kv_cache.dtype} on {kv_cache.device}: "
                f"use device='cpu' and kv_cache_dtype='float32'"
            )

    def plan(self, batch: FlatBatch, kv_cache: KVCache) -> PartMetadata:
        return PartMetadata(self.inner.plan(batch, kv_cache), batch)

    def write(self, k: Tensor, v: Tensor, layer_index: int, metadata: PartMetadata) -> None:
        self.inner.write(k, v, layer_index, metadata.inner)

    def attend(self, q: Tensor, layer_index: int, metadata: PartMetadata) -> Tensor:
        out = self.inner.attend(q, layer_index, metadata.inner)  # decodes too, which are then written over
        batch, n = metadata.batch, metadata.batch.num_decodes
        if n:
            kv = metadata.inner.kv_cache.layers[layer_index]
            tables, lens = batch.block_tables[:n], batch.seq_lens[:n]
            arrays = (x.detach().contiguous().numpy() for x in (q[:n].to(kv.dtype), kv[0], kv[1], tables, lens))
            out[:n] = torch.from_numpy(self.function(*arrays)).to(q.dtype)
        return out
