"""The model runner: from a SchedulerOutput to sampled tokens, in one flat batch (lab 13).

    block_ops -> KVCache.apply            first, in order
    scheduled -> FlatBatch -> CausalLM    decodes first, then chunks; one forward for all
              -> Sampler                  for those whose last known token was computed

Everything per token is NumPy on persistent rows of block tables: Python touches each sequence once, each
token never. `kvlab.model.batch.flat_batch` is the slow and readable way to the same batch.
"""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch

from kvlab.blocks import cdiv
from kvlab.engine.logits import Adjustment, top_logprobs
from kvlab.engine.sampler import Sampler, SampleRow
from kvlab.model.batch import FlatBatch
from kvlab.model.decoder import CausalLM
from kvlab.model.kv_cache import KVCache
from kvlab.sampling_params import uniform
from kvlab.schedule import Request, SampledTokens, SchedulerOutput


class TableRows:
    """Copies of the block tables of running sequences, one row each, brought up to date by what is new.

    Only a cache: a row is known by the table's version, so a request that comes back, or whose block was
    replaced by a copy, is read again as a whole, and rows of sequences that have left may be dropped at any time.
    """

    def __init__(self, max_num_seqs: int, max_num_blocks: int):
        self.ids = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_num_seqs))
        self._version = [0] * max_num_seqs
        self._filled = [0] * max_num_seqs

    def sync(self, output: SchedulerOutput) -> dict[str, int]:
        """Bring the rows of all scheduled sequences up to date; row by request id."""
        row_of, versions, num_filled = self._row_of, self._version, self._filled
        if len(self._free) < len(output.scheduled):
            scheduled = {request.request_id for request, _ in output.scheduled}
            for gone in [request_id for request_id in self._row_of if request_id not in scheduled]:
                self._free.append(self._row_of.pop(gone))
        for (request, _), table in zip(output.scheduled, output.block_tables, strict=True):
            row = row_of.get(request.request_id)
            if row is None:
                row = row_of[request.request_id] = self._free.pop()
            filled = num_filled[row] if versions[row] == table.version else 0
            if len(table) != filled:
                self.ids[row, filled : len(table)] = [block.block_id for block in table[filled:]]
                versions[row], num_filled[row] = table.version, len(table)
        return row_of


class ModelRunner:
    """Runs a CausalLM over its KVCache for the engine.

    layout: lays out every step in the place of ours, as kvlab.model.batch.flat_batch(seqs, block_size) does.
    """

    def __init__(self, model: CausalLM, kv_cache: KVCache, max_num_seqs: int, max_model_len: int,
                 layout: Callable | None = None):  # fmt: skip
        self.model = model
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.layout = layout
        self.sampler = Sampler()
        self.rows = TableRows(max_num_seqs, cdiv(max_model_len, kv_cache.block_size))

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Make the copies, compute every scheduled token, sample. Token ids by request id."""
        sampled = SampledTokens()
        if not output.block_ops_done:
            self.kv_cache.apply(output.block_ops)
            output.block_ops_done = True
        if not output.scheduled:
            return sampled
        batch, samplers, prompt_rows = self.prepare(output)
        logits = self.model.forward(batch, self.kv_cache)
        rows, owners = [], []
        for index, request in enumerate(samplers):
            for child in range(1 + request.num_to_fork):
                rows.append(sample_row(index, request, child))
                owners.append(request)
        tokens = self.sampler(logits, rows)
        for request, token in zip(owners, tokens, strict=True):
            sampled.setdefault(request.request_id, []).append(token)
        asked = [i for i, request in enumerate(owners) if request.num_logprobs is not None]
        if asked:
            entries = top_logprobs(logits[[rows[i].row for i in asked]], [tokens[i] for i in asked],
                                   [owners[i].num_logprobs for i in asked])  # fmt: skip
            for i, entry in zip(asked, entries, strict=True):
                sampled.logprobs.setdefault(owners[i].request_id, []).append(entry)
        if prompt_rows:
            self._keep_prompt_logprobs(logits[len(samplers) :], prompt_rows)
        return sampled

    @staticmethod
    def _keep_prompt_logprobs(logits: torch.Tensor, prompt_rows: list[tuple[Request, int]]) -> None:
        """By position, so that doing it again (a step that is tried anew, a recomputation) changes nothing."""
        token_ids = [request.all_token_ids[position] for request, position in prompt_rows]
        counts = [request.sampling_params.prompt_logprobs for request, _ in prompt_rows]
        entries = top_logprobs(logits, token_ids, counts)
        for (request, position), entry in zip(prompt_rows, entries, strict=True):
            request.prompt_logprobs[position] = entry

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Let a backend that compiles kernels compile all that steps of up to so many tokens can need; others: nothing.

        Compiled while serving, a kernel would keep the requests of that moment waiting for a second or more.
        """
        self.model.warm_up(max_num_batched_tokens)
        batches = getattr(self.model.backend, "warm_up_batches", None)
        if batches is not None:
            for batch in batches(self.kv_cache, max_num_batched_tokens, self.max_model_len):
                self.model.forward(batch, self.kv_cache)

    def prepare(self, output: SchedulerOutput) -> tuple[FlatBatch, list[Request], list[tuple[Request, int]]]:
        """Lay out the step; also whom the rows of the logits are for.

        First the requests to sample for, then (request, position) of prompt tokens whose log-probability is asked for.
        """
        row_of = self.rows.sync(output)
        ordered = [entry for entry in output.scheduled if entry[1] == 1]
        num_decodes = len(ordered)
        if num_decodes < len(output.scheduled):
            ordered += [entry for entry in output.scheduled if entry[1] != 1]
        token_ids, starts, table_rows = [], [], []
        samplers, sampler_rows, prompt_rows, prompt_row_ids = [], [], [], []
        for request, num_tokens in ordered:
            tokens, start = request.all_token_ids, request.num_computed_tokens
            starts.append(start)
            table_rows.append(row_of[request.request_id])
            if num_tokens == 1:
                token_ids.append(tokens[start])
            else:
                token_ids += tokens[start : start + num_tokens]
            if start + num_tokens == len(tokens):
                samplers.append(request)
                sampler_rows.append(len(token_ids) - 1)
            if start + 1 < request.num_prompt_tokens and request.needs_prompt_logprobs:
                first = len(token_ids) - num_tokens - start  # the row of position 0, if it were here
                for position in range(start + 1, min(start + num_tokens + 1, request.num_prompt_tokens)):
                    prompt_rows.append((request, position))
                    prompt_row_ids.append(first + position - 1)

        if self.layout is not None:
            return self._lay_out(output, ordered, samplers, prompt_row_ids), samplers, prompt_rows
        rows, starts = np.array(table_rows), np.array(starts)
        counts = np.array([num_tokens for _, num_tokens in ordered])
        seq_lens = starts + counts
        query_start_loc = np.zeros(len(ordered) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start_loc[:-1], counts)
        size = self.kv_cache.block_size
        blocks = self.rows.ids[np.repeat(rows, counts), positions // size].astype(np.int64)
        max_seq_len = int(seq_lens.max())

        def tensor(values, dtype=None):  # by way of NumPy, which reads a list twice as fast
            return torch.from_numpy(np.asarray(values, dtype=dtype)).to(self.kv_cache.device)

        batch = FlatBatch(
            token_ids=tensor(token_ids, np.int64),
            positions=tensor(positions),
            slot_mapping=tensor(blocks * size + positions % size),
            query_start_loc=tensor(query_start_loc),
            seq_lens=tensor(seq_lens, np.int32),
            block_tables=tensor(self.rows.ids[rows, : cdiv(max_seq_len, size)]),
            logits_indices=tensor(sampler_rows + prompt_row_ids, np.int64),
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        return batch, samplers, prompt_rows

    def _lay_out(self, output: SchedulerOutput, ordered: list[tuple[Request, int]], samplers: list[Request],
                 prompt_row_ids: list[int]) -> FlatBatch:  # fmt: skip
        """The batch as `layout` makes it, on the model's device. Rows for the prompt's log-probabilities are added."""
        tables = {request.request_id: table for (request, _), table in
                  zip(output.scheduled, output.block_tables, strict=True)}  # fmt: skip
        sampled = {request.request_id for request in samplers}
        seqs = []
        for request, num_tokens in ordered:
            start, name = request.num_computed_tokens, request.request_id
            token_ids = list(request.all_token_ids[start : start + num_tokens])
            seqs.append((token_ids, start, [block.block_id for block in tables[name]], name in sampled))
        batch = self.layout(seqs, self.kv_cache.block_size)
        values = {field.name: getattr(batch, field.name) for field in fields(FlatBatch)}
        more = torch.tensor(prompt_row_ids, dtype=torch.int64)
        values["logits_indices"] = torch.cat((batch.logits_indices, more))
        tensors = {name: x.to(self.kv_cache.device) for name, x in values.items() if isinstance(x, torch.Tensor)}
        return FlatBatch(**values | tensors)


def sample_row(index: int, request: Request, child: int) -> SampleRow:
    """What the sampler needs to draw the next token of `request`, or the first one of its child `child`."""
    params, position = request.sampling_params, request.num_output_tokens
    adjustment = None
    if position < params.min_tokens or params.logit_bias or params.has_penalties:
        must_go_on = position < params.min_tokens
        adjustment = Adjustment(
            banned=(*request.eos_token_ids, *params.stop_token_ids) if must_go_on else (),
            bias=tuple((params.logit_bias or {}).items()),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            prompt=request.prompt_token_ids,
            output=request.output_token_ids,
        )
    return SampleRow(
        row=index,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=uniform(request.seed + child, position) if params.temperature > 0 else 0.0,
        adjustment=adjustment,
    )
