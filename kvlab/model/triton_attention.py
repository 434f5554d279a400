"""Attention by the Triton kernels (kvlab_kernels): they read the pages in place, nothing is gathered.

    attend, once a layer     decodes only    split_kv    each context cut among several programs, then merged
                             else            varlen      chunks and decodes in one launch

K and V come to their slots by the same kernel that rotates them (kvlab.model.triton_ops), or by `write` if the model is
in float64, which the kernels of rung 10 do not compute in, or if its RoPE is somebody's own.

What a launch depends on is settled once a step, in `plan`, by the bucket (桶) that the step falls into, never by the
lengths themselves: the batch size and the longest context, each rounded up to a power of two. A CUDA graph can only be
replayed so, and few different kernels are compiled.

With `split_tokens`, contexts are cut after so many tokens whatever else runs, and decodes go to split_kv in every step.
Then a decode's result has the same bits in any batch. (A token that is computed again after a preemption comes as
part of a chunk, and may differ in its last bits from what it was as a decode.)

Importing this module imports Triton, which is why nobody does before a backend "triton" is asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvlab.blocks import cdiv
from kvlab.model.batch import FlatBatch
from kvlab.model.kv_cache import KVCache
from kvlab.model.ops import Ops
from kvlab.model.triton_ops import TritonOps
from kvlab_kernels import block_copy
from kvlab_kernels.cache_write import reshape_and_cache
from kvlab_kernels.checks import DTYPES, check_cache
from kvlab_kernels.configs import LONG_QUERY, num_sms
from kvlab_kernels.launch import INTERPRETED, check_device
from kvlab_kernels.quantized import quantize_and_cache
from kvlab_kernels.split_kv import Workspace, choose_num_splits, make_workspace, split_kv_attention
from kvlab_kernels.varlen import varlen_attention
from kvlab_kernels.warmup import warm_up_steps

OLDEST = (8, 0)  # compute capability: Ampere, the first with bf16 on tensor cores


@dataclass
class Decodes:
    """The first n rows of the step, one for each of n sequences."""

    block_tables: Tensor  # int32 [n, W]
    seq_lens: Tensor  # int32 [n]
    max_seq_len: int  # of the bucket
    num_splits: int | None  # None: after split_tokens


@dataclass
class Chunks:
    """The rows from `first` on: sequences with any number of rows."""

    first: int
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor  # int32 [n + 1], from 0; the kernel finds its sequence in it by binary search
    max_query_len: int  # by which the kernel's sizes are chosen


@dataclass
class TritonMetadata:
    kv_cache: KVCache
    slot_mapping: Tensor
    decodes: Decodes | None
    chunks: Chunks | None


class TritonAttention:
    """The kernels as an AttentionBackend. On a GPU compiled; without one interpreted, which is slow, and right.

    split_tokens: cut every context after so many tokens, for the same bits in any batch; 0 cuts as is quickest. The
        workspace then has 4 * H * (D + 1) bytes for each decode and each split_tokens of the longest context.

    The kernels compute in the dtype that K and V are stored in, to which q is converted; with INT8 K and V in q's own.
    """

    interpreted = INTERPRETED
    graph_safe = True  # plan and attend only launch, with what follows from the bucket: no look at a value
    block_copy = block_copy  # with which the cache moves its blocks

    def __init__(self, split_tokens: int = 0):
        if split_tokens < 0:
            raise ValueError(f"split_tokens is {split_tokens}: give 0, or tokens after which to cut, such as 512")
        self.split_tokens = split_tokens
        self._workspace = torch.empty(0), torch.empty(0)
        self._outgrown = []  # a captured graph writes to the workspace of its day: never given back

    def check(self, kv_cache: KVCache) -> None:
        """ValueError or RuntimeError, with the remedy, if the kernels cannot read `kv_cache` here."""
        check_cache(kv_cache.layers[0], kv_cache.scales[0] if kv_cache.quantized else None)
        if kv_cache.device.type == "cuda" and not INTERPRETED:
            capability = torch.cuda.get_device_capability(kv_cache.device)
            if capability < OLDEST:
                here, needed = (".".join(map(str, pair)) for pair in (capability, OLDEST))
                raise ValueError(
                    f"this GPU has compute capability {here}, the kernels need {needed}: use attention_backend 'torch'"
                )
        check_device(kv_cache.layers[0])

    def ops_for(self, dtype: torch.dtype) -> Ops:
        """The operations beside attention, of a model in `dtype`."""
        return TritonOps() if dtype in DTYPES else Ops()

    def warm_up_batches(
        self, kv_cache: KVCache, max_num_batched_tokens: int, max_model_len: int
    ) -> Iterator[FlatBatch]:
        """Batches that reach every kernel which an engine with these limits needs. Forwards of them write to no block.

        Their tokens go to slot -1, which is none, and their tables name the null block only.
        """
        for query_lens, seq_lens in warm_up_steps(max_num_batched_tokens, max_model_len):
            count = sum(query_lens)
            rows = torch.zeros(count, dtype=torch.int64, device=kv_cache.device)
            starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=kv_cache.device)
            width = cdiv(max(seq_lens), kv_cache.block_size)
            yield FlatBatch(
                token_ids=rows,
                positions=rows,
                slot_mapping=rows - 1,
                query_start_loc=starts,
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=kv_cache.device),
                block_tables=torch.zeros((len(seq_lens), width), dtype=torch.int32, device=kv_cache.device),
                logits_indices=rows[:1],
                num_decodes=sum(n == 1 for n in query_lens),
                max_query_len=max(query_lens),
                max_seq_len=max(seq_lens),
            )

    def plan(self, batch: FlatBatch, kv_cache: KVCache) -> TritonMetadata:
        """Who computes which rows. Decodes come first in a batch; a step of nothing else is all `decodes`."""
        num_seqs, n = len(batch.seq_lens), batch.num_decodes
        if n == num_seqs:
            parts = self._decodes(batch, kv_cache, n), None
        elif not self.split_tokens:
            all_rows = Chunks(0, batch.block_tables, batch.seq_lens, batch.query_start_loc, batch.max_query_len)
            parts = None, all_rows
        else:
            # Copies: a slice's address is not aligned as a whole tensor's is, which would take another kernel.
            tables, lens, starts = (x[n:].clone() for x in (batch.block_tables, batch.seq_lens, batch.query_start_loc))
            parts = self._decodes(batch, kv_cache, n) if n else None, Chunks(n, tables, lens, starts - n, LONG_QUERY)
        return TritonMetadata(kv_cache, batch.slot_mapping, *parts)

    def _decodes(self, batch: FlatBatch, kv_cache: KVCache, n: int) -> Decodes:
        longest, num_splits = bucket(batch.max_seq_len), None
        if not self.split_tokens:
            num_splits = choose_num_splits(bucket(n), kv_cache.block_shape[1], longest, num_sms(kv_cache.device))
        return Decodes(batch.block_tables[:n], batch.seq_lens[:n], longest, num_splits)

    def write(self, k: Tensor, v: Tensor, layer_index: int, metadata: TritonMetadata) -> None:
        kv_cache, kv = metadata.kv_cache, metadata.kv_cache.layers[layer_index]
        if kv_cache.quantized:
            quantize_and_cache(k, v, kv, kv_cache.scales[layer_index], metadata.slot_mapping)
        else:
            reshape_and_cache(k, v, kv, metadata.slot_mapping)

    def attend(self, q: Tensor, layer_index: int, metadata: TritonMetadata) -> Tensor:
        kv_cache = metadata.kv_cache
        kv, scales = kv_cache.layers[layer_index], None
        if kv_cache.quantized:
            scales = kv_cache.scales[layer_index]
            queries = q.to(torch.float32 if q.dtype == torch.float64 else q.dtype)
        else:
            queries = q.to(kv.dtype)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if d := metadata.decodes:
            n, num_heads, head_dim = len(d.seq_lens), *q.shape[1:]
            num_splits = d.num_splits or cdiv(d.max_seq_len, self.split_tokens)
            workspace = self._room(n, num_heads, num_splits, head_dim, q.device)
            split_kv_attention(
                queries[:n], kv, d.block_tables, d.seq_lens, scales=scales, max_seq_len=d.max_seq_len,
                num_splits=d.num_splits, split_tokens=self.split_tokens or None, workspace=workspace, out=out[:n],
            )  # fmt: skip
        if c := metadata.chunks:
            varlen_attention(
                queries[c.first :], kv, c.block_tables, c.seq_lens, c.query_start_loc,
                scales=scales, max_query_len=c.max_query_len, out=out[c.first :],
            )  # fmt: skip
        return out.to(q.dtype)

    def _room(self, num_seqs: int, num_heads: int, num_splits: int, head_dim: int, device) -> Workspace:
        """A workspace in memory that all layers and steps use again; it grows to the largest."""
        partial, lse = self._workspace
        count = num_seqs * num_heads * num_splits
        if len(lse) < count or len(partial) < count * head_dim or lse.device != device:
            self._outgrown.append(self._workspace)
            made = make_workspace(num_seqs, num_heads, num_splits, head_dim, device)
            partial, lse = self._workspace = made.partial.view(-1), made.lse.view(-1)
        shape = num_seqs, num_heads, num_splits
        return Workspace(partial[: count * head_dim].view(*shape, head_dim), lse[:count].view(shape))


def bucket(n: int) -> int:
    """The least power of two that is at least n: what a step of n sequences, or n tokens at the most, is planned as."""
    return 1 << max(n - 1, 0).bit_length()
