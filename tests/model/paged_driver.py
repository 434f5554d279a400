"""Drives a CausalLM by hand: scattered block tables, chunks of any size, no scheduler."""

import random

import torch

from kvlab.model.batch import flat_batch
from kvlab.model.kv_cache import KVCache


class PagedDriver:
    """Sequences over one KVCache whose blocks are handed out in random order. Unwritten slots hold NaN."""

    def __init__(self, model, config, block_size: int, num_blocks: int = 200, seed: int = 0):
        self.model = model
        self.kv_cache = KVCache(config, num_blocks, block_size, model.dtype)
        for layer in self.kv_cache.layers:
            layer[:, 1:] = torch.nan
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: dict = {}
        self.lengths: dict = {}

    def step(self, chunks: dict, wants=None) -> dict:
        """Compute {sequence: its next token ids}; the logits [vocab] after the last token of each of `wants`."""
        seqs = []
        for name, tokens in chunks.items():
            table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            self.lengths[name] = start + len(tokens)
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
            seqs.append((list(tokens), start, table, wants is None or name in wants))
        batch = flat_batch(seqs, self.block_size)
        logits = self.model.forward(batch, self.kv_cache)
        names = [name for name, seq in zip(chunks, seqs, strict=True) if seq[3]]
        assert logits.shape == (len(names), self.model.config.vocab_size)
        return dict(zip(names, logits, strict=True))

    def greedy(self, name, tokens, count: int) -> list[int]:
        """Prefill `tokens` in one step, then decode `count` tokens one by one."""
        out = [int(self.step({name: tokens})[name].argmax())]
        while len(out) < count:
            out.append(int(self.step({name: out[-1:]})[name].argmax()))
        return out


def random_tokens(count: int, seed: int = 0, vocab: int = 223) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, vocab) for _ in range(count)]
