"""A step as the host sees it, and how somebody's own layout makes a batch of it (lab 12)."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from kvlab.blocks import cdiv
from kvlab.model.batch import FlatBatch
from kvlab.model.kv_cache import KVCache
from kvlab.schedule import Request


@dataclass
class Prepared:
    """A step as the host sees it: lists in the order of the flat batch, decodes first.

    For each sequence: its first position to compute, how many tokens, its row of block tables. logits_rows: rows of
    the batch whose logits are needed, first for `samplers`, then for `prompt_rows`, (request, position) of prompt
    tokens whose log-probability is asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)
    num_decodes: int = 0
    logits_rows: list[int] = field(default_factory=list)
    samplers: list[Request] = field(default_factory=list)
    prompt_rows: list[tuple[Request, int]] = field(default_factory=list)


def lay_out_by(layout: Callable, step: Prepared, tables: np.ndarray, kv_cache: KVCache) -> FlatBatch:
    """The batch as `layout` makes it, on the cache's device. Rows for the prompt's log-probabilities are added."""
    size, first, seqs = kv_cache.block_size, 0, []
    sampled = set(step.logits_rows[: len(step.samplers)])
    for start, count, row in zip(step.starts, step.counts, step.table_rows, strict=True):
        last = first + count
        block_ids = tables[row, : cdiv(start + count, size)].tolist()
        seqs.append((step.token_ids[first:last], start, block_ids, last - 1 in sampled))
        first = last
    batch = layout(seqs, size)
    values = {field.name: getattr(batch, field.name) for field in fields(FlatBatch)}
    more = torch.tensor(step.logits_rows[len(step.samplers) :], dtype=torch.int64)
    values["logits_indices"] = torch.cat((batch.logits_indices, more))
    return FlatBatch(**values | {name: x.to(kv_cache.device) for name, x in values.items() if isinstance(x, Tensor)})
