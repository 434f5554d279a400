"""Stand-ins that let a CPU walk the way of CUDA graphs."""

import dataclasses

import torch

from kvlab.engine.graphs import GraphPool, make_pool
from kvlab.model.attention import TorchAttention
from kvlab.model.batch import FlatBatch


class RecallingGraphs:
    """A replay calls the captured function again: on the tensors that it had when it was captured, and no others.

    Python numbers of later steps cannot reach it, as they cannot reach a graph. Before each replay all that a graph may
    not rely on is poisoned: the logits of the last step, and the staging buffer behind this step's pieces.
    """

    def __init__(self, runner):
        self.runner = runner
        self.num_captured = self.num_replayed = 0

    def capture(self, run):
        self.num_captured += 1
        run()

        def replay():
            self.num_replayed += 1
            self.runner.graphs.logits.fill_(torch.nan)
            for memory in (self.runner.staging.fixed, self.runner.staging.overflow):
                memory.host[memory.used :].fill_(255)  # NaN as float64, -1 as a whole number
            run()

        return replay


def put_graphs_on(llm, sizes=(1, 2, 4, 8), lengths=None) -> RecallingGraphs:
    """From now on `llm` runs its decodes through stand-in graphs."""
    runner = llm.engine.runner
    recalling = RecallingGraphs(runner)
    pool = make_pool(recalling, sizes, llm.config.max_model_len, llm.model)
    runner.graphs = pool if lengths is None else GraphPool(recalling, sizes, lengths, pool.logits)
    return recalling


class PaddedTorch(TorchAttention):
    """TorchAttention that takes rows of slot -1 for padding, as kernels do: written nowhere, their result is zero."""

    def plan(self, batch: FlatBatch, kv_cache):
        n = int((batch.slot_mapping >= 0).sum())
        if n == len(batch.slot_mapping):
            return n, super().plan(batch, kv_cache)
        assert batch.num_decodes == len(batch.seq_lens), "only steps of decodes are padded"
        assert (batch.seq_lens[n:] == 1).all() and not batch.block_tables[n:, 0].any(), "padding reads the null block"
        real = dataclasses.replace(
            batch, token_ids=batch.token_ids[:n], positions=batch.positions[:n], slot_mapping=batch.slot_mapping[:n],
            query_start_loc=batch.query_start_loc[: n + 1], seq_lens=batch.seq_lens[:n],
            block_tables=batch.block_tables[:n], num_decodes=n, max_seq_len=max(batch.seq_lens[:n].tolist(), default=0),
        )  # fmt: skip
        return n, super().plan(real, kv_cache) if n else None

    def write(self, k, v, layer_index, metadata):
        n, inner = metadata
        if n:
            super().write(k[:n], v[:n], layer_index, inner)

    def attend(self, q, layer_index, metadata):
        n, inner = metadata
        out = torch.zeros_like(q)
        if n:
            out[:n] = super().attend(q[:n], layer_index, inner)
        return out
