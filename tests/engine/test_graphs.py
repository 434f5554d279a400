"""Decodes by bucket, through stand-in graphs: the tokens, the cache and the launches are those of eager steps."""

import gc

import pytest
import torch
from graph_doubles import PaddedTorch, put_graphs_on
from test_equality import make_engine, run, workload

from kvlab import LLM, SamplingParams
from kvlab.config import EngineConfig
from kvlab.engine.graphs import (
    GraphPool,
    capture_lengths,
    capture_sizes,
    estimate_bytes,
    graph_bytes,
    make_graph_pool,
)  # fmt: skip
from kvlab.engine.inputs import Prepared
from kvlab.engine.runner import ModelRunner
from kvlab.engine.staging import StagingBuffer
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache


def tokens_of(llm, requests, seed):
    return {
        name: sorted(request.output_token_ids for request in done) for name, done in run(llm, requests, seed).items()
    }


@pytest.mark.parametrize("pressure", ["none", "recompute", "swap"])
@pytest.mark.parametrize("block_size, budget, n", [(4, 256, 3), (1, 5, 1), (16, 19, 3)])
def test_the_same_tokens_as_eager_with_forks_hits_chunks_and_preemption(checkpoint, block_size, budget, n, pressure):
    arguments = checkpoint("qwen2-tied"), "float64", block_size, budget, pressure, True, n
    requests = workload(block_size, n)
    expected = tokens_of(make_engine(*arguments), requests, 3)
    llm = make_engine(*arguments)
    llm.model.use(PaddedTorch())
    recalling = put_graphs_on(llm, sizes=(1, 2, 4), lengths=(24, 40, 256))
    poison(llm)
    assert tokens_of(llm, requests, 3) == expected
    assert recalling.num_replayed > recalling.num_captured > 1
    if pressure != "none":
        assert llm.stats()[f"num_preemptions_{pressure}"] > 0


def poison(llm) -> None:
    """NaN in every block but the null block: what a graph reads and nobody has written shows."""
    for layer in llm.engine.runner.kv_cache.layers:
        layer[:, 1:] = torch.nan


def test_every_batch_size_and_only_its_own_slots(checkpoint):
    """Batches grow to 9 and shrink to 1: through all buckets, and beyond the last, where steps are eager."""
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=10 - i, ignore_eos=True) for i in range(9)]
    prompts = [[i + 1, 5, 7 + i, 9][: 2 + i % 3] for i in range(9)]
    options = dict(dtype="float64", block_size=4, num_gpu_blocks_override=60, max_model_len=40, max_num_seqs=9)
    folder = str(checkpoint("qwen2-tied"))
    expected = [output.outputs[0].token_ids for output in LLM(folder, **options).generate(prompts, params)]
    llm = LLM(folder, **options)
    llm.model.use(PaddedTorch())
    put_graphs_on(llm, sizes=(1, 2, 4, 8))
    poison(llm)
    runner, forward, seen = llm.engine.runner, llm.engine.runner.forward, []

    def checked(batch, key):
        seen.append((int((batch.slot_mapping >= 0).sum()), key))
        if key is not None:  # what a backend plans by is the bucket's
            assert (batch.num_decodes, batch.max_seq_len, batch.max_query_len) == (*key, 1)
        before = [layer.clone() for layer in runner.kv_cache.layers]
        logits = forward(batch, key)
        own = batch.slot_mapping[batch.slot_mapping >= 0]
        for layer, old in zip(runner.kv_cache.layers, before, strict=True):
            for half, kept in zip(layer, old, strict=True):
                half, kept = half.flatten(0, 1).clone(), kept.flatten(0, 1)
                assert half[own].isfinite().all()
                half[own] = kept[own]
                assert torch.equal(half.nan_to_num(7.5), kept.nan_to_num(7.5)), "a slot that is nobody's was written"
        return logits

    runner.forward = checked
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    decodes = [pair for pair in seen if pair[1] is not None]
    assert {n for n, _ in decodes} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert all(size == min(s for s in (1, 2, 4, 8) if s >= n) for n, (size, _) in decodes)
    assert any(n == 9 for n, key in seen if key is None)


def test_logprobs_and_prompts_that_end_in_a_step_of_one_token(checkpoint):
    """A prompt's last token alone is a decode like any other; its logits are asked for in the same step."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    prompts = [[3, 4, 5, 6, 7], [9], [8, 9, 10]]
    options = dict(dtype="float64", block_size=4, num_gpu_blocks_override=60, max_num_batched_tokens=2, max_num_seqs=3)
    folder, got = str(checkpoint("qwen2-tied")), []
    for graphs in (False, True):
        llm = LLM(folder, **options)
        if graphs:
            llm.model.use(PaddedTorch())
            recalling = put_graphs_on(llm)
        got.append(
            [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in llm.generate(prompts, params)]
        )
    assert recalling.num_replayed > 5
    for (tokens, logprobs, of_prompt), (want_tokens, want_logprobs, want_of_prompt) in zip(*got, strict=True):
        assert tokens == want_tokens
        for entries, wanted in ((logprobs, want_logprobs), (of_prompt[1:], want_of_prompt[1:])):
            for entry, want in zip(entries, wanted, strict=True):
                assert entry.keys() == want.keys()
                assert all(entry[t].logprob == pytest.approx(want[t].logprob) for t in entry)


def test_a_step_whose_prompt_is_not_over_has_no_logits_and_may_be_a_graph(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), block_size=4, num_gpu_blocks_override=20, max_num_batched_tokens=1)
    expected = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids
    llm = LLM(str(checkpoint("qwen2-tied")), block_size=4, num_gpu_blocks_override=20, max_num_batched_tokens=1)
    llm.model.use(PaddedTorch())
    recalling = put_graphs_on(llm)
    assert llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids == expected
    assert recalling.num_replayed == 5


def test_a_step_that_brings_too_much_leaves_a_graphs_inputs_where_they_are(checkpoint):
    """Penalties over long prompts do not fit behind the batch. They go elsewhere, and the graphs stay good."""
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, repetition_penalty=penalty)
        for penalty in (1.0, 1.5)
    ]
    prompts, options = [list(range(1, 90)), list(range(30, 120))], dict(dtype="float64", num_gpu_blocks_override=20)
    expected = [o.outputs[0].token_ids for o in LLM(str(checkpoint("qwen2-tied")), **options).generate(prompts, params)]
    llm = LLM(str(checkpoint("qwen2-tied")), **options)
    llm.model.use(PaddedTorch())
    recalling = put_graphs_on(llm, sizes=(2,))
    runner = llm.engine.runner
    runner.staging = StagingBuffer(1024, "cpu")
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    assert runner.staging.overflow.used > 0
    assert recalling.num_captured == 1 and recalling.num_replayed == 5


# --- on interpreted kernels

OPTIONS = {"block_size": 4, "num_gpu_blocks_override": 60, "max_model_len": 48, "max_num_seqs": 4}


# The kernel of RoPE leaves q of a padding row as the memory was; what attention makes of it nobody reads.
ANYTHING = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@ANYTHING
@pytest.mark.parametrize("options", [{}, {"deterministic_split_tokens": 16}, {"kv_cache_dtype": "int8"}], ids=str)
def test_kernels_take_padding_and_a_launch_is_the_same_whatever_the_step(checkpoint, monkeypatch, options):
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    prompts = [[7, 8, 9, 10, 11], [7, 8, 9], list(range(20, 26))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 3, 6)]
    folder = str(checkpoint("qwen2-tied"))
    plain = {name: value for name, value in options.items() if name != "deterministic_split_tokens"}
    expected = LLM(folder, attention_backend="torch", **OPTIONS | plain).generate(prompts, params)
    llm = LLM(folder, attention_backend="triton", **OPTIONS | options)
    runner = llm.engine.runner
    put_graphs_on(llm, sizes=(1, 2, 4), lengths=(12, 48))
    if not options.get("kv_cache_dtype"):
        poison(llm)
    start = runner.staging.fixed.host.data_ptr()
    stop = start + len(runner.staging.fixed.host)
    launch, forward, launches, by_key = InterpretedFunction.run, runner.forward, [], {}

    def recorded(self, *args, grid, warmup=False, **kwargs):
        plain = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float)]
        inputs = [x.data_ptr() for x in args if isinstance(x, torch.Tensor) and start <= x.data_ptr() < stop]
        launches.append((self.fn.__name__, tuple(grid), plain, inputs))
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    def seen(batch, key):
        launches.clear()
        logits = forward(batch, key)
        if key is not None:
            assert all(address % 16 == 0 for _, _, _, inputs in launches for address in inputs)
            half = launches[len(launches) // 2 :] if key not in by_key else list(launches)  # a capture runs it twice
            by_key.setdefault(key, []).append(half)
        return logits

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    runner.forward = seen
    got = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
    assert len(by_key) >= 4 and any(len(steps) > 1 for steps in by_key.values())
    for key, steps in by_key.items():
        assert steps[0] and all(step == steps[0] for step in steps), key


@ANYTHING
def test_warm_up_captures_every_bucket_and_writes_nothing(checkpoint):
    pytest.importorskip("triton")
    llm = LLM(str(checkpoint("qwen2-tied")), attention_backend="triton", **OPTIONS)
    recalling = put_graphs_on(llm, sizes=(1, 3), lengths=(12, 48))
    captured = []
    capture = recalling.capture
    recalling.capture = lambda run: captured.append(len(captured)) or capture(run)
    llm.engine.runner.warm_up(max_num_batched_tokens=4)
    assert len(captured) == len(llm.engine.runner.graphs) == 4
    assert llm.engine.runner.graphs.keys()[0] == (3, 48)  # the others find room in its memory
    assert all(not layer.any() for layer in llm.engine.runner.kv_cache.layers)
    llm.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=3))
    assert len(captured) == 4


# --- the rules


def test_sizes_pad_few_rows_and_reach_every_seat():
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 3]
    assert capture_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    for seats in (1, 7, 8, 100, 256, 257, 1000):
        sizes = capture_sizes(seats)
        assert sizes == sorted(set(sizes)) and sizes[-1] == seats
        for n in range(1, seats + 1):
            assert min(s for s in sizes if s >= n) - n <= (7 if n <= 256 else 15)


def test_lengths_reach_the_longest_context():
    assert capture_lengths(100) == [100]
    assert capture_lengths(1024) == [1024]
    assert capture_lengths(32768) == [1024, 8192, 32768]
    assert capture_lengths(131072) == [1024, 8192, 65536, 131072]


def test_the_estimate_of_their_memory_grows_with_what_they_hold():
    config = ModelConfig("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768)
    one = estimate_bytes(config, torch.bfloat16, [8], 1)
    assert one < estimate_bytes(config, torch.bfloat16, [8], 3) < estimate_bytes(config, torch.bfloat16, [8, 16], 3)
    assert one > 8 * 152064 * 4


@pytest.mark.parametrize("sizes", [[0], [1, 300], [True], ["2"]])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
        EngineConfig(cudagraph_capture_sizes=sizes)
    with pytest.raises(ValueError, match="enforce_eager"):
        EngineConfig(enforce_eager=1)


def test_inputs_of_the_largest_graph_do_not_move():
    """They lie in the buffer that never grows, for a graph keeps their addresses: with very many seats, too."""
    cache = KVCache(ModelConfig("qwen2", 8, 8, 1, 1, 1, 8, 16, 64), 2, 16, torch.float32)
    runner = ModelRunner(None, cache, max_num_seqs=20_000, max_model_len=16)
    batch = runner.lay_out(Prepared(), key=(20_000, 16))[0]
    assert batch.logits_indices.shape == (20_000,) and runner.staging.overflow.used == 0


def test_no_graphs_without_a_gpu(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), num_gpu_blocks_override=8, max_model_len=20)
    assert llm.engine.runner.graphs is None and make_graph_pool(llm.config, llm.model) is None
    assert graph_bytes(llm.config, llm.model) == 0


class Garbage:
    """Lives in a cycle, so that only the collector can end it; says when that happens."""

    ends = []

    def __init__(self):
        self.itself = self

    def __del__(self):
        self.ends.append(self)


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_recorded(fails):
    """It may hold a graph of an engine that is gone, and CUDA forbids to destroy one during a recording."""

    class Recording:
        def capture(self, run):
            Garbage.ends.clear()
            Garbage()
            many = [[] for _ in range(200_000)]  # far more than start the collector
            run()
            assert many and not Garbage.ends
            return run

    def forward():
        if fails:
            raise RuntimeError("out of memory")
        return torch.ones(2, 5)

    pool = GraphPool(Recording(), [2], [8], torch.zeros(2, 5))
    assert gc.isenabled()
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.run((2, 8), forward)
    else:
        assert (pool.run((2, 8), forward) == 1).all()
    assert gc.isenabled()
    gc.collect()
    assert Garbage.ends
