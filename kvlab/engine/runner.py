"""The model runner: from a SchedulerOutput to sampled tokens, in one flat batch (lab 13).

    block_ops -> KVCache.apply            first, in order
    scheduled -> FlatBatch -> CausalLM    decodes first, then chunks; one forward for all
              -> Sampler                  for those whose last known token was computed

Everything per token is NumPy on persistent rows of block tables: Python touches each sequence once, each
token never. `kvlab.model.batch.flat_batch` is the slow and readable way to the same batch.

The host waits for the device once a step, for the sampled tokens. All that the device needs goes there before, in one
copy (StagingBuffer); a step of decodes alone may be the replay of a CUDA graph (GraphPool).
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from kvlab.blocks import cdiv
from kvlab.engine.core import DeviceLost
from kvlab.engine.graphs import GraphPool, Key
from kvlab.engine.inputs import Prepared, lay_out_by
from kvlab.engine.logits import Adjustment, top_logprobs
from kvlab.engine.sampler import SamplePlan, Sampler, SampleRow
from kvlab.engine.staging import StagingBuffer
from kvlab.engine.table_rows import TableRows
from kvlab.model.batch import FlatBatch
from kvlab.model.decoder import CausalLM
from kvlab.model.kv_cache import KVCache
from kvlab.sampling_params import uniform
from kvlab.schedule import Request, SampledTokens, SchedulerOutput


class ModelRunner:
    """Runs a CausalLM over its KVCache for the engine.

    layout: lays out every step in the place of ours, as kvlab.model.batch.flat_batch(seqs, block_size) does.
    graphs: replays steps of decodes; None runs all of them eagerly.
    """

    def __init__(self, model: CausalLM, kv_cache: KVCache, max_num_seqs: int, max_model_len: int,
                 layout: Callable | None = None):  # fmt: skip
        self.model = model
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.layout = layout
        self.sampler = Sampler()
        self.graphs: GraphPool | None = None
        width = cdiv(max_model_len, kv_cache.block_size)
        self.rows = TableRows(max_num_seqs, width)
        # All seats decoding at full length, which graphs must find here, or some thousand tokens of prompts.
        # A decode is 40 bytes (4 numbers of 8, 2 of 4) beside its table.
        self.staging = StagingBuffer((64 + 4 * width) * max_num_seqs + (1 << 18), kv_cache.device)

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Make the copies, compute every scheduled token, sample. Token ids by request id.

        DeviceLost where CUDA has failed for good, as it has for a process after an illegal memory access.
        """
        try:
            return self._execute(output)
        except Exception as error:
            if self.kv_cache.device.type == "cuda":
                try:
                    torch.cuda.synchronize(self.kv_cache.device)
                except RuntimeError:
                    raise DeviceLost(f"the GPU has failed: start the process again. First came: {error}") from error
            raise

    def _execute(self, output: SchedulerOutput) -> SampledTokens:
        sampled = SampledTokens()
        if not output.block_ops_done:
            self.kv_cache.apply(output.block_ops)
            output.block_ops_done = True
        if not output.scheduled:
            return sampled
        step = self.prepare(output)
        rows, owners = [], []
        for index, request in enumerate(step.samplers):
            for child in range(1 + request.num_to_fork):
                rows.append(sample_row(index, request, child))
                owners.append(request)
        plan = None
        if isinstance(self.sampler, Sampler):  # another one is called with the logits and the rows
            exact = self.model.dtype == torch.float64
            plan = SamplePlan(rows, self.model.config.vocab_size, torch.float64 if exact else torch.float32)
        batch, key, arrays = self.lay_out(step, plan.arrays if plan else {})
        logits = self.forward(batch, key)[: len(step.logits_rows)]
        tokens = []
        if rows:
            tokens = self.sampler.enqueue(logits, plan, arrays).tokens() if plan else self.sampler(logits, rows)
        for request, token in zip(owners, tokens, strict=True):
            sampled.setdefault(request.request_id, []).append(token)
        self._keep_logprobs(logits, step, rows, owners, tokens, sampled)
        return sampled

    def forward(self, batch: FlatBatch, key: Key | None) -> Tensor:
        """Logits of the batch; padded to the bucket if `key` names one."""
        if key is None:
            return self.model.forward(batch, self.kv_cache)
        return self.graphs.run(key, lambda: self.model.forward(batch, self.kv_cache))

    @staticmethod
    def _keep_logprobs(logits: Tensor, step: Prepared, rows: list[SampleRow], owners: list[Request],
                       tokens: list[int], sampled: SampledTokens) -> None:  # fmt: skip
        """The log-probabilities that are asked for, in one more transfer from the device.

        Those of prompts are kept by position, so that doing it again (a step that is tried anew, a recomputation)
        changes nothing.
        """
        asked = [i for i, request in enumerate(owners) if request.num_logprobs is not None]
        if not asked and not step.prompt_rows:
            return
        positions = [request.all_token_ids[position] for request, position in step.prompt_rows]
        counts = [request.sampling_params.prompt_logprobs for request, _ in step.prompt_rows]
        entries = top_logprobs(
            logits[[rows[i].row for i in asked] + list(range(len(step.samplers), len(logits)))],
            [tokens[i] for i in asked] + positions,
            [owners[i].num_logprobs for i in asked] + counts,
        )
        for i, entry in zip(asked, entries, strict=False):
            sampled.logprobs.setdefault(owners[i].request_id, []).append(entry)
        for (request, position), entry in zip(step.prompt_rows, entries[len(asked) :], strict=True):
            request.prompt_logprobs[position] = entry

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Let a backend that compiles kernels compile all that steps of up to so many tokens can need; others: nothing.

        Compiled while serving, a kernel would keep the requests of that moment waiting for a second or more. Graphs are
        captured here too, the largest first, from steps of padding alone: they write to no block.
        """
        self.model.warm_up(max_num_batched_tokens)
        batches = getattr(self.model.backend, "warm_up_batches", None)
        if batches is not None:
            for batch in batches(self.kv_cache, max_num_batched_tokens, self.max_model_len):
                self.model.forward(batch, self.kv_cache)
        if self.graphs is not None:
            self.graphs.capture_all(lambda key: self.forward(*self.lay_out(Prepared(), key=key)[:2]))

    def prepare(self, output: SchedulerOutput) -> Prepared:
        """Put the step in the order of the batch, and see whom its logits will be for."""
        row_of = self.rows.sync(output)
        ordered = [entry for entry in output.scheduled if entry[1] == 1]
        step = Prepared(num_decodes=len(ordered))
        if len(ordered) < len(output.scheduled):
            ordered += [entry for entry in output.scheduled if entry[1] != 1]
        token_ids, prompt_row_ids = step.token_ids, []
        for request, num_tokens in ordered:
            tokens, start = request.all_token_ids, request.num_computed_tokens
            step.starts.append(start)
            step.counts.append(num_tokens)
            step.table_rows.append(row_of[request.request_id])
            if num_tokens == 1:
                token_ids.append(tokens[start])
            else:
                token_ids += tokens[start : start + num_tokens]
            if start + num_tokens == len(tokens):
                step.samplers.append(request)
                step.logits_rows.append(len(token_ids) - 1)
            if start + 1 < request.num_prompt_tokens and request.needs_prompt_logprobs:
                first = len(token_ids) - num_tokens - start  # the row of position 0, if it were here
                for position in range(start + 1, min(start + num_tokens + 1, request.num_prompt_tokens)):
                    step.prompt_rows.append((request, position))
                    prompt_row_ids.append(first + position - 1)
        step.logits_rows += prompt_row_ids
        return step

    def _send(self, more: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        arrays, tensors = self.staging.lay_out({name: (array.dtype, array.shape) for name, array in more.items()})
        for name, array in more.items():
            arrays[name][...] = array
        self.staging.send()
        return tensors

    def lay_out(
        self, step: Prepared, more: Mapping[str, np.ndarray] | None = None, key: Key | None = None
    ) -> tuple[FlatBatch, Key | None, dict[str, Tensor]]:
        """The step on the device: the batch, the graph to replay it with if there is one, and tensors of `more`.

        With a key the batch is padded to its size, and its tensors lie where those of every step with that key do.
        """
        num_seqs, num_tokens, num_logits = len(step.starts), len(step.token_ids), len(step.logits_rows)
        starts, counts = np.array(step.starts, dtype=np.int64), np.array(step.counts, dtype=np.int64)
        seq_lens = starts + counts
        max_seq_len, max_query_len = int(seq_lens.max(initial=1)), int(counts.max(initial=1))
        size = self.kv_cache.block_size
        used = cdiv(max_seq_len, size)
        if key is None and self.graphs is not None and step.num_decodes == num_seqs:
            key = self.graphs.key(num_seqs, max_seq_len)
        s, t, r, d, width = num_seqs, num_tokens, num_logits, step.num_decodes, used  # the sizes of the batch
        if key is not None:
            s = t = r = d = key[0]
            width, max_seq_len = cdiv(key[1], size), key[1]
        more = more or {}
        if self.layout is not None:
            return lay_out_by(self.layout, step, self.rows.ids, self.kv_cache), None, self._send(more)
        arrays, tensors = self.staging.lay_out(
            {
                "token_ids": (np.int64, (t,)),
                "positions": (np.int64, (t,)),
                "slot_mapping": (np.int64, (t,)),
                "query_start_loc": (np.int32, (s + 1,)),
                "seq_lens": (np.int32, (s,)),
                "block_tables": (np.int32, (s, width)),
                "logits_indices": (np.int64, (r,)),
                **{name: (array.dtype, array.shape) for name, array in more.items()},
            }
        )
        arrays["query_start_loc"][0] = 0
        ends = np.cumsum(counts, out=arrays["query_start_loc"][1 : num_seqs + 1])
        positions = np.arange(num_tokens) + np.repeat(starts + counts - ends, counts)
        rows = np.array(step.table_rows, dtype=np.int64)
        blocks = self.rows.ids[np.repeat(rows, counts), positions // size].astype(np.int64)
        arrays["token_ids"][:num_tokens] = step.token_ids
        arrays["positions"][:num_tokens] = positions
        arrays["slot_mapping"][:num_tokens] = blocks * size + positions % size
        arrays["seq_lens"][:num_seqs] = seq_lens
        arrays["block_tables"][:num_seqs, :used] = self.rows.ids[rows, :used]  # nobody reads what stands behind
        arrays["logits_indices"][:num_logits] = step.logits_rows
        if key is not None:  # the rest is padding, one row for each sequence, as in every decode
            arrays["token_ids"][num_tokens:] = 0
            arrays["positions"][num_tokens:] = 0
            arrays["slot_mapping"][num_tokens:] = -1
            arrays["query_start_loc"][num_seqs + 1 :] = np.arange(num_seqs + 1, s + 1)
            arrays["seq_lens"][num_seqs:] = 1
            arrays["block_tables"][num_seqs:, 0] = 0
            arrays["logits_indices"][num_logits:] = 0
        for name, array in more.items():
            arrays[name][...] = array
        self.staging.send()
        extra = {name: tensors[name] for name in more}
        inputs = {name: tensor for name, tensor in tensors.items() if name not in more}
        return FlatBatch(**inputs, num_decodes=d, max_query_len=max_query_len, max_seq_len=max_seq_len), key, extra


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
