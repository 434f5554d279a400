"""One wait a step: the host looks at the device's results once, for the sampled tokens, and never before."""

import pytest
import torch
from host_waits import HostWaits

from kvlab.config import EngineConfig
from kvlab.engine import sampler as module
from kvlab.engine.core import EngineCore
from kvlab.engine.logits import Adjustment
from kvlab.engine.runner import ModelRunner
from kvlab.engine.sampler import SamplePlan, Sampler, SampleRow
from kvlab.model.batch import flat_batch
from kvlab.model.config import ModelConfig
from kvlab.model.decoder import CausalLM
from kvlab.model.kv_cache import KVCache
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler

VOCAB = 300
SHAPE = ModelConfig("qwen2", 16, 16, 2, 4, 2, 4, VOCAB, 64, attention_bias=True)
PENALTIES = Adjustment((1, 2), ((5, 2.0), (7, -1.0)), 1.3, 0.4, 0.3, prompt=[1, 2, 3], output=[4, 4, 9])
ROWS = [
    SampleRow(0),
    SampleRow(1, 1.0, uniform=0.3),
    SampleRow(1, 0.7, top_p=0.9, uniform=0.2),
    SampleRow(2, 0.7, top_k=5, min_p=0.1, uniform=0.2, adjustment=PENALTIES),
]


class TableModel:
    """A model without attention: a token's logits stand in a table."""

    dtype, backend, config = torch.float32, None, SHAPE

    def __init__(self, spread: float = 4.0):
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * spread

    def forward(self, batch, kv_cache):
        return self.table[batch.token_ids[batch.logits_indices]]


class CountingRunner(ModelRunner):
    """Keeps what the host looked at in each step, and how many rows the step sampled."""

    def execute(self, output):
        # Block ids of copies and swaps go up by themselves, when the device has nothing to do yet.
        self.kv_cache.apply(output.block_ops)
        output.block_ops_done = True
        with HostWaits() as waits:
            sampled = super().execute(output)
        self.steps = [*getattr(self, "steps", []), (waits.found, sum(len(tokens) for tokens in sampled.values()))]
        return sampled


def steps_of(params: list[SamplingParams], model=None, **options) -> list[tuple[list[str], int]]:
    config = EngineConfig(block_size=4, num_gpu_blocks_override=100, max_num_seqs=8, max_model_len=64, **options)
    runner = CountingRunner(model or TableModel(), KVCache(SHAPE, 100, 4, torch.float32), 8, 64)
    core = EngineCore(Scheduler(config), runner)
    for i, param in enumerate(params):
        core.add_request(Request(str(i), range(1 + i, 12), param))
    while core.has_unfinished_requests():
        for result in core.step():
            assert result.finish_reason != "error"
    return runner.steps


MIXED = [
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(temperature=1.0, max_tokens=7, n=2),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.05, max_tokens=9),
    SamplingParams(temperature=0.9, top_k=10, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
                   logit_bias={4: 1.0, 5: -100.0}, min_tokens=3, stop_token_ids=(7, 8), max_tokens=5),
]  # fmt: skip


@pytest.mark.parametrize("params", [MIXED[:1], MIXED], ids=["greedy", "everything"])
@pytest.mark.parametrize("budget", [5, 2048], ids=["chunks", "whole prompts"])
def test_a_step_waits_once_and_one_that_samples_nothing_never(params, budget):
    steps = steps_of(params, max_num_batched_tokens=budget)
    assert len(steps) > 5
    for found, num_sampled in steps:
        assert found == (["tolist"] if num_sampled else [])
    assert any(num_sampled == 0 for _, num_sampled in steps) == (budget == 5)


def test_log_probabilities_cost_one_more_wait():
    params = [SamplingParams(temperature=0.8, logprobs=3, prompt_logprobs=2, max_tokens=3)] * 2
    for found, _ in steps_of(params):
        assert [name for name in found if name != "aten::lift_fresh"] == ["tolist", "tolist"]


def test_rows_that_are_looked_at_again_cost_more_and_only_then():
    """A flat distribution: 128 ranks do not reach top-p."""
    steps = steps_of([SamplingParams(temperature=1.0, top_p=0.95, max_tokens=3)], TableModel(spread=0.01))
    assert all(found.count("tolist") == 2 for found, _ in steps)


def test_the_forward_around_attention_never_waits():
    """Attention is the backend's; that of kernels only launches (test_graphs)."""

    class Nothing:
        plan = write = lambda *_: None

        def attend(self, q, *_):
            return q

    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, 16), "model.norm.weight": (16,)}
    for i in range(2):
        p = f"model.layers.{i}"
        shapes |= {f"{p}.input_layernorm.weight": (16,), f"{p}.post_attention_layernorm.weight": (16,)}
        shapes |= {
            f"{p}.self_attn.{name}_proj.weight": (n, 16) for name, n in (("q", 16), ("k", 8), ("v", 8), ("o", 16))
        }
        shapes |= {f"{p}.mlp.{name}_proj.weight": (16, 16) for name in ("gate", "up", "down")}
        shapes |= {f"{p}.self_attn.{name}_proj.bias": (n,) for name, n in (("q", 16), ("k", 8), ("v", 8))}
    shapes["lm_head.weight"] = (VOCAB, 16)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    model = CausalLM(SHAPE, weights, backend=Nothing())
    batch = flat_batch([([5, 6, 7], 0, [1], True), ([9], 3, [2], True)], 4)
    with HostWaits() as waits:
        model.forward(batch, KVCache(SHAPE, 4, 4, torch.float32))
    assert waits.found == []


def test_draws_are_enqueued_on_the_device_alone():
    """On "meta" tensors, which have no values: whoever looks at one, or mixes in one of the CPU, fails."""
    for rows in (ROWS, ROWS[:1], ROWS[1:2], ROWS[2:], ROWS[:2]):
        rows = [
            SampleRow(i, r.temperature, r.top_k, r.top_p, r.min_p, r.uniform, r.adjustment) for i, r in enumerate(rows)
        ]
        for order in (rows, rows[::-1]):
            plan = SamplePlan(order, VOCAB, torch.float32)
            arrays = {name: torch.from_numpy(array).to("meta") for name, array in plan.arrays.items()}
            draws = Sampler().enqueue(torch.empty(len(rows), VOCAB, device="meta"), plan, arrays)
            assert draws.result.shape == (len(rows),) and draws.result.device.type == "meta"


@pytest.mark.parametrize("first_look", [1, 7])
def test_more_looks_give_the_same_tokens(first_look, monkeypatch):
    """bf16 logits, full of equals: the boundary runs between them nearly always."""
    logits = (torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) * 2).bfloat16().float()
    kinds = [dict(top_p=0.9), dict(top_k=3), dict(top_k=50, top_p=0.5), dict(top_p=0.999, min_p=0.001)]
    rows = [SampleRow(i, 0.9, uniform=(i + 0.5) / 40, **kinds[i % 4]) for i in range(40)]
    monkeypatch.setattr(module, "FIRST_LOOK", 3000)  # all ranks at once: nothing is ever in doubt
    expected = Sampler()(logits, rows)
    monkeypatch.setattr(module, "FIRST_LOOK", first_look)
    assert Sampler()(logits, rows) == expected


def test_another_sampler_is_called_with_the_logits_and_the_rows():
    calls = []

    def last_token(logits, rows):
        calls.append(([row.row for row in rows], tuple(logits.shape)))
        return [VOCAB - 1] * len(rows)

    runner = ModelRunner(TableModel(), KVCache(SHAPE, 100, 4, torch.float32), 8, 64)
    runner.sampler = last_token
    core = EngineCore(Scheduler(EngineConfig(block_size=4, num_gpu_blocks_override=100, max_model_len=64)), runner)
    request = Request("a", [1, 2, 3], SamplingParams(n=2, max_tokens=2))
    core.add_request(request)
    while core.has_unfinished_requests():
        core.step()
    assert calls == [([0, 0], (1, VOCAB)), ([0, 1], (2, VOCAB))]


def test_the_counter_counts():
    x = torch.arange(6.0).view(2, 3)
    looks = [lambda: x.tolist(), lambda: x[0, 0].item(), lambda: (x > 1).any() and 1, lambda: x[x > 1],
             lambda: x.unique(), lambda: (x > 1).nonzero(), lambda: x.numpy(), lambda: torch.tensor([1]),
             lambda: x[: torch.tensor(1)]]  # fmt: skip
    for look in looks:
        with HostWaits() as waits:
            look()
        assert waits.found
    with HostWaits() as waits:
        x[torch.empty(0, dtype=torch.int64)].sum(-1).masked_fill_(torch.zeros(0, dtype=torch.bool), 1.0)
    assert waits.found == []
