"""The runner's way to a step's inputs against the slow one, `flat_batch`, under pressure, forks and swaps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import LLM
from kvlab.blocks import BlockTable, KVCacheBlock
from kvlab.config import EngineConfig
from kvlab.engine.core import DeviceLost, EngineCore
from kvlab.engine.runner import ModelRunner
from kvlab.model.batch import flat_batch
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler, SchedulerOutput
from kvlab.sim import SlotEchoRunner

MAX_LEN = 40


class ComparingRunner:
    """Prepares each step in both ways, compares, and lets the slot-echo model give the tokens."""

    def __init__(self, config: EngineConfig):
        size, num_blocks, num_cpu = config.block_size, config.num_gpu_blocks_override, config.num_cpu_blocks_override
        smallest = ModelConfig("qwen2", 8, 8, 1, 1, 1, 2, 16, MAX_LEN)
        kv_cache = KVCache(smallest, num_blocks, size, torch.float32)
        self.runner = ModelRunner(None, kv_cache, config.max_num_seqs, MAX_LEN)
        self.echo = SlotEchoRunner(num_blocks, size, num_cpu)
        self.complaint: Exception | None = None

    def execute(self, output):
        try:
            if output.scheduled:
                self.compare(output)
        except Exception as error:  # the engine would take it for a request that fails
            self.complaint = error
        return self.echo.execute(output)

    def compare(self, output) -> None:
        step = self.runner.prepare(output)
        samplers, prompt_rows = step.samplers, step.prompt_rows
        batch, _, _ = self.runner.lay_out(step)
        entries = list(zip(output.scheduled, output.block_tables, strict=True))
        entries.sort(key=lambda entry: entry[0][1] != 1)  # decodes first, else in order
        seqs, row, want_samplers, want_prompt_rows, prompt_row_ids = [], 0, [], [], []
        for (request, count), table in entries:
            start, stop = request.num_computed_tokens, request.num_computed_tokens + count
            seqs.append((request.all_token_ids[start:stop], start, table.block_ids, stop == request.num_tokens))
            if stop == request.num_tokens:
                want_samplers.append(request)
            for position in range(start, stop):  # its row says how likely the token after it is
                if request.needs_prompt_logprobs and position + 1 < request.num_prompt_tokens:
                    want_prompt_rows.append((request, position + 1))
                    prompt_row_ids.append(row + position - start)
            row += count
        want = flat_batch(seqs, self.echo.block_size)
        assert samplers == want_samplers and prompt_rows == want_prompt_rows
        assert batch.logits_indices.tolist() == want.logits_indices.tolist() + prompt_row_ids
        for name in ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens"):
            got, right = getattr(batch, name), getattr(want, name)
            assert got.dtype == right.dtype and torch.equal(got, right), name
        for name in ("num_decodes", "max_query_len", "max_seq_len"):
            assert getattr(batch, name) == getattr(want, name), name
        assert batch.block_tables.dtype == torch.int32
        for i, seq_len in enumerate(want.seq_lens.tolist()):
            used = -(-seq_len // self.echo.block_size)  # what stands behind may be anything
            assert batch.block_tables[i, :used].tolist() == want.block_tables[i, :used].tolist()
        for request, position in prompt_rows:
            request.prompt_logprobs[position] = None


JOBS = st.lists(
    st.tuples(
        st.integers(1, 20), st.integers(1, 12), st.sampled_from([1, 1, 2, 3]), st.sampled_from([None, None, 0]),
        st.integers(0, 1),
    ),
    min_size=1, max_size=10,
)  # fmt: skip


@given(JOBS, st.sampled_from([1, 3, 4, 16]), st.integers(0, 12), st.sampled_from([0, 30]), st.sampled_from([3, 8, 64]))
@settings(max_examples=120)
def test_inputs_are_those_of_flat_batch_step_by_step(jobs, block_size, spare, num_cpu, budget):
    config = EngineConfig(
        block_size=block_size, num_gpu_blocks_override=1 + -(-32 // block_size) + spare, max_num_seqs=4,
        num_cpu_blocks_override=num_cpu, max_num_batched_tokens=budget, max_model_len=MAX_LEN,
    )  # fmt: skip
    runner = ComparingRunner(config)
    core = EngineCore(Scheduler(config), runner)
    for i, (prompt, outputs, n, prompt_logprobs, first) in enumerate(jobs):
        params = SamplingParams(n=n, max_tokens=outputs, prompt_logprobs=prompt_logprobs)
        core.add_request(Request(str(i), [first, *range(prompt - 1)], params))
    while core.has_unfinished_requests():
        core.step()
        if runner.complaint is not None:
            raise runner.complaint


def test_slots_past_2_to_the_31():
    """Block ids are int32, but id x block size may need more."""
    smallest = ModelConfig("qwen2", 8, 8, 1, 1, 1, 2, 16, MAX_LEN)
    runner = ModelRunner(None, KVCache(smallest, 2, 16, torch.float32), 1, MAX_LEN)
    request, far = Request("a", range(20)), 2**28
    table = BlockTable([KVCacheBlock(far + 5), KVCacheBlock(far)])
    batch, _, _ = runner.lay_out(runner.prepare(SchedulerOutput(1, [(request, 20)], [table])))
    assert batch.slot_mapping.tolist() == [(far + 5) * 16 + i for i in range(16)] + [far * 16 + i for i in range(4)]


@pytest.mark.parametrize(("lost_in", "tried"), [(1, [2]), (2, [2, 1]), (3, [2, 1, 1])])
def test_a_gpu_that_is_lost_ends_the_engine_and_not_each_request(monkeypatch, checkpoint, lost_in, tried):
    """After an illegal access every call of CUDA fails: a server that lives on would answer nothing but errors.

    The GPU is lost in the batch, or while the requests are tried alone.
    """
    llm = LLM(str(checkpoint("qwen2-tied")), num_gpu_blocks_override=20, max_model_len=40)
    runner, calls, works = llm.engine.runner, [], [99]

    def forward(batch, key):
        calls.append(len(batch.seq_lens))
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    def synchronize(device):
        works[0] -= 1
        if works[0] <= 0:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "forward", forward)
    monkeypatch.setattr(runner.kv_cache, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for prompt in ([1, 2], [3, 4, 5]):
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
    assert [delta.error is None for delta in llm.step()] == [False, False]  # a device that works
    assert calls == [2, 1, 1] and not llm.engine.has_unfinished_requests()
    works[0] = lost_in
    calls.clear()
    for prompt in ([1, 2], [3, 4, 5]):
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
    with pytest.raises(DeviceLost, match="start the process again.*illegal memory access"):
        llm.step()
    assert calls == tried
