"""Attention over pages: K and V are found through block tables (块表), never by contiguous position.

    plan(batch, kv_cache)  once a step: all index arithmetic -> metadata
    write(k, v, layer)     once a layer: to their slots (a fused kernel may do it instead: kvlab.model.ops)
    attend(q, layer)       then: softmax(q K^T / sqrt(D)) V

`naive_paged_attention` says what is meant, in loops; it is the oracle of every backend. `TorchAttention`
computes the same with few and large operations:

    decodes   [q0 q1 q2 ...]   one gather and one batched attention for each group of similar context lengths
    chunks    [q q q q] [q q]  one attention for each sequence

The kernels that read the pages in place are kvlab.model.triton_attention; who takes which: kvlab.model.backends.

A query attends to all positions of its sequence up to its own (causal). H query heads share Hkv KV heads in
groups of G = H / Hkv (GQA).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.model.batch import FlatBatch
from kvlab.model.kv_cache import KVCache
from kvlab.model.quantize import dequantize

# K and V gathered at once. More falls out of the cache before attention reads it: 32 contexts of 1000 tokens
# took 1.6x as long in one gather.
GATHER_BYTES = 4 << 20


class AttentionBackend(Protocol):
    """What the model asks of attention. `metadata` is the backend's own; the model only hands it back."""

    def plan(self, batch: FlatBatch, kv_cache: KVCache) -> Any:
        """Work out, once a step, what all layers will need."""
        ...

    def write(self, k: Tensor, v: Tensor, layer_index: int, metadata: Any) -> None:
        """Put k and v [T, Hkv, D] of this step, rotated, into their slots."""
        ...

    def attend(self, q: Tensor, layer_index: int, metadata: Any) -> Tensor:
        """q [T, H, D] of this step, whose K and V of this layer have been written -> [T, H, D]."""
        ...


# --- the oracle ------------------------------------------------------------------------------------------


def naive_paged_attention(q: Tensor, kv: Tensor, batch: FlatBatch) -> Tensor:
    """Causal attention of q [T, H, D] over one layer's cache kv [2, blocks, block_size, Hkv, D] -> [T, H, D].

    In fp32, or in float64 if q is. Follows L33 2.2 word for word: position -> logical block -> block table ->
    physical block, offset.
    """
    block_size, num_kv_heads = kv.shape[2], kv.shape[3]
    group = q.shape[1] // num_kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)
    starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for seq, seq_len in enumerate(seq_lens):
        table = batch.block_tables[seq].tolist()
        slots = [(table[p // block_size], p % block_size) for p in range(seq_len)]
        keys = torch.stack([kv[0, block, offset] for block, offset in slots]).to(wide)
        values = torch.stack([kv[1, block, offset] for block, offset in slots]).to(wide)
        for row in range(starts[seq], starts[seq + 1]):
            context = seq_len - (starts[seq + 1] - row) + 1  # the positions up to this token's own
            for head in range(q.shape[1]):
                scores = keys[:context, head // group] @ q[row, head].to(wide) * q.shape[2] ** -0.5
                out[row, head] = (scores.softmax(0) @ values[:context, head // group]).to(q.dtype)
    return out


class NaiveAttention:
    """`naive_paged_attention` as a backend: slow, and right."""

    def plan(self, batch: FlatBatch, kv_cache: KVCache):
        return batch, kv_cache

    def write(self, k, v, layer_index, metadata):
        batch, kv_cache = metadata
        kv_cache.write(layer_index, k, v, batch.slot_mapping)

    def attend(self, q, layer_index, metadata):
        batch, kv_cache = metadata
        return naive_paged_attention(q, kv_cache.layer(layer_index, q.dtype), batch)


# --- PyTorch, quick on a CPU -----------------------------------------------------------------------------


@dataclass
class Decodes:
    """n sequences with one query each, padded to the longest context L."""

    rows: Tensor | slice  # of q: int64 [n], or a slice (a view, no copy) when one group is all
    slots: Tensor  # int64 [2 * n * L]: where K, then where V of each position lies
    visible: Tensor  # bool [n, 1, 1, L]


@dataclass
class Chunk:
    """One sequence's rows start:end, attending over all its tokens so far."""

    start: int
    end: int
    slots: Tensor | None  # int64 [2 * L]; None when the chunk is all there is
    visible: Tensor | None  # bool [end - start, L]


@dataclass
class TorchMetadata:
    kv_cache: KVCache
    slot_mapping: Tensor
    decodes: list[Decodes]
    chunks: list[Chunk]
    scratch: Tensor  # room for the largest gather, used again by every layer
    at_hand: tuple[Tensor, Tensor] | None = None  # K and V that were written last, if a chunk needs no others


class TorchAttention:
    """Gathers the pages into contiguous K and V, then calls PyTorch's attention. Runs on any device.

    (A kernel reads the pages in place, L33 2.3; from outside, a gather is what PyTorch offers.)
    """

    def plan(self, batch: FlatBatch, kv_cache: KVCache) -> TorchMetadata:
        num_decodes = batch.num_decodes
        slot_bytes = kv_cache.bytes_per_block // kv_cache.block_size // len(kv_cache.layers)
        seq_lens, starts = batch.seq_lens.tolist(), batch.query_start_loc.tolist()
        decodes = []
        for group in group_by_length(seq_lens[:num_decodes], GATHER_BYTES // slot_bytes):
            one_group = len(group) == num_decodes
            rows = slice(0, num_decodes) if one_group else torch.tensor(group, device=kv_cache.device)
            longest = max(seq_lens[i] for i in group)
            slots, visible = context_slots(batch.block_tables[rows], batch.seq_lens[rows], longest, kv_cache)
            decodes.append(Decodes(rows, slots, visible[:, None, None]))
        chunks = []
        for i in range(num_decodes, len(seq_lens)):
            start, end, seq_len = starts[i], starts[i + 1], seq_lens[i]
            if end - start == seq_len:  # from position 0: K and V are still at hand, and plain causal
                chunks.append(Chunk(start, end, None, None))
                continue
            slots, _ = context_slots(batch.block_tables[[i]], batch.seq_lens[[i]], seq_len, kv_cache)
            context = torch.arange(seq_len, device=slots.device)
            chunks.append(Chunk(start, end, slots, context <= batch.positions[start:end, None]))
        gathers = [x.slots.numel() for x in [*decodes, *chunks] if x.slots is not None]
        row = kv_cache.block_shape[1] * kv_cache.block_shape[2]
        scratch = torch.empty((max(gathers, default=0), row), dtype=kv_cache.dtype, device=kv_cache.device)
        return TorchMetadata(kv_cache, batch.slot_mapping, decodes, chunks, scratch)

    def write(self, k: Tensor, v: Tensor, layer_index: int, metadata: TorchMetadata) -> None:
        kv_cache = metadata.kv_cache
        kv_cache.write(layer_index, k, v, metadata.slot_mapping)
        if any(c.slots is None for c in metadata.chunks):
            metadata.at_hand = kv_cache.as_read(k), kv_cache.as_read(v)  # the chunk sees what others will read

    def attend(self, q: Tensor, layer_index: int, metadata: TorchMetadata) -> Tensor:
        kv_cache = metadata.kv_cache
        num_kv_heads, head_dim = kv_cache.block_shape[1:]
        pages = kv_cache.layers[layer_index].view(-1, metadata.scratch.shape[1])  # one row per slot
        scales = kv_cache.scales[layer_index].view(-1, num_kv_heads) if kv_cache.quantized else None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

        def gather(slots: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
            """K and V, each [num_seqs, Hkv, L, D], in the scratch memory."""
            kv = torch.index_select(pages, 0, slots, out=metadata.scratch[: slots.numel()]).unflatten(1, (-1, head_dim))
            kv = kv.to(q.dtype) if scales is None else dequantize(kv, scales.index_select(0, slots), q.dtype)
            return kv.view(2, num_seqs, -1, num_kv_heads, head_dim).transpose(2, 3).unbind(0)

        for d in metadata.decodes:
            n = d.visible.shape[0]
            keys, values = gather(d.slots, n)
            # The G heads that share a KV head pose as G query positions: K and V are read once, not G times.
            queries = q[d.rows].view(n, num_kv_heads, -1, head_dim)
            result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=d.visible)
            out[d.rows] = result.reshape(n, -1, head_dim)
        for c in metadata.chunks:
            queries = q[None, c.start : c.end].transpose(1, 2)
            if c.slots is None:
                keys, values = (x[None, c.start : c.end].transpose(1, 2) for x in metadata.at_hand)
            else:
                keys, values = gather(c.slots, 1)
            out[c.start : c.end] = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=c.visible, is_causal=c.slots is None, enable_gqa=True
            )[0].transpose(0, 1)
        return out


def group_by_length(seq_lens: list[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into groups of similar length: their indices, longest first.

    A group is padded to its longest context. Its size times that is at most `max_tokens`, unless it is one
    sequence.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(seq_lens)), key=lambda i: -seq_lens[i]):
        if not groups or (len(groups[-1]) + 1) * seq_lens[groups[-1][0]] > max_tokens:
            groups.append([])
        groups[-1].append(i)
    return groups


def context_slots(
    block_tables: Tensor, seq_lens: Tensor, longest: int, kv_cache: KVCache
) -> tuple[Tensor, Tensor]:
    """(slots int64 [2 * n * longest], visible bool [n, longest]) for n sequences.

    The slots index the rows of a layer seen as [2 * num_slots, Hkv * D], K's half first. Positions behind the
    end read slot 0 of the null block: whatever lies in unwritten slots or in the table's tail is never
    touched. (A mask alone would not do: 0 * NaN is NaN.)
    """
    positions = torch.arange(longest, device=block_tables.device)
    visible = positions < seq_lens[:, None]
    blocks = block_tables.long()[:, positions // kv_cache.block_size]
    slots = torch.where(visible, blocks * kv_cache.block_size + positions % kv_cache.block_size, 0).view(-1)
    return torch.cat((slots, slots + kv_cache.num_blocks * kv_cache.block_size)), visible
