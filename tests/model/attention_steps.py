"""Steps for attention backends: a cache whose unwritten slots hold NaN, and batches of any past and present."""

import random

import torch

from kvlab.model.backends import get_attention_backend
from kvlab.model.batch import flat_batch
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache


def make_cache(num_heads, num_kv_heads, head_dim, block_size, num_blocks, dtype=torch.float64) -> KVCache:
    config = ModelConfig("qwen2", 8, 8, 2, num_heads, num_kv_heads, head_dim, 16, 4096)
    kv_cache = KVCache(config, num_blocks, block_size, dtype)
    for tensor in kv_cache.scales or kv_cache.layers:
        tensor[:, 1:] = torch.nan  # nothing that was not written may matter
    return kv_cache


def make_step(kv_cache, chunks, seed=0):
    """A batch of (tokens already computed, tokens now) and its q, k, v; the past K and V are in the cache."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    free = list(range(1, kv_cache.num_blocks))
    rng.shuffle(free)
    seqs = []
    num_kv_heads, head_dim = kv_cache.block_shape[1:]
    for past, now in chunks:
        table = [free.pop() for _ in range(-(-(past + now) // kv_cache.block_size))]
        seqs.append(([0] * now, past, table, True))
        for position in range(past):
            block, offset = table[position // kv_cache.block_size], position % kv_cache.block_size
            slot = torch.tensor([block * kv_cache.block_size + offset])
            for layer in range(len(kv_cache.layers)):
                kv_cache.write(layer, *torch.randn(2, 1, num_kv_heads, head_dim, generator=generator), slot)
    return flat_batch(seqs, kv_cache.block_size), generator


def attend_with(name, kv_cache, batch, q, k, v, layer_index=1, split_tokens=0):
    for tensor in kv_cache.scales or kv_cache.layers:  # each backend must write k and v itself
        tensor.flatten(1, 2)[:, batch.slot_mapping] = torch.nan
    backend = get_attention_backend(name, split_tokens)
    with torch.inference_mode():
        metadata = backend.plan(batch, kv_cache)
        backend.write(k, v, layer_index, metadata)
        out = backend.attend(q, layer_index, metadata)
    written = kv_cache.layer(layer_index, k.dtype).view(2, -1, *k.shape[1:])[:, batch.slot_mapping]
    assert torch.equal(written[0], kv_cache.as_read(k)) and torch.equal(written[1], kv_cache.as_read(v))
    return out


def blocks_for(chunks, block_size) -> int:
    """Enough for `make_step`, with two that nobody uses and the null block."""
    return 3 + sum(-(-(past + now) // block_size) for past, now in chunks)
