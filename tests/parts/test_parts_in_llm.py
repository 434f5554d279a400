"""Parts in the engine that serves a model: the same tokens, and what is said when one fails there."""

from functools import wraps
from itertools import accumulate, takewhile

import pytest
import torch
from test_parts import OTHERS, ListQueue, mine, raising, sample

from kvlab import LLM, EngineConfig, Parts, SamplingParams
from kvlab.engine import memory
from kvlab.engine.text import Detokenizer, StopChecker
from kvlab.model.batch import FlatBatch
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import kv_bytes_per_token
from kvlab.parts import PartError, survive
from kvlab.standin.decode import paged_attention

PROMPTS = ["The free queue", "The free queue holds", "A block table", "Why"]
PARAMS = SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=12)
OPTIONS = dict(num_gpu_blocks_override=16, block_size=4, max_model_len=48, max_num_seqs=5, dtype="float64")


@pytest.mark.parametrize("extra", [{}, {"reservation": "contiguous"}])
def test_parts_change_no_token(extra):
    def tokens(parts):
        llm = LLM("tiny", parts=parts, **OPTIONS, **extra)
        return [[c.token_ids for c in out.outputs] for out in llm.generate(PROMPTS, PARAMS)], llm

    got, llm = tokens(Parts(**OTHERS))
    assert isinstance(llm.engine.scheduler.manager.block_pool.free_block_queue, ListQueue)
    assert got == tokens(None)[0]


def test_sizing_plans_the_blocks():
    def sizing(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, cudagraph_bytes, block_bytes):
        asked.append((total_bytes, block_bytes))
        return 21

    asked = []
    llm = LLM("tiny", parts=Parts(sizing=sizing))
    assert llm.config.num_gpu_blocks_override == 21
    if not torch.cuda.is_available():
        assert asked[0][0] == memory.CPU_POOL_BYTES
    assert memory.plan_blocks(llm.config, llm.model_config, torch.float32)[0] == 21  # named by now: nobody is asked


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_computes_the_decodes(dtype):
    def attention(q, keys, values, block_tables, seq_lens):
        asked.append((q.shape, keys.shape, seq_lens.tolist()))
        return paged_attention(q, keys, values, block_tables, seq_lens)

    def tokens(parts, **options):
        llm = LLM("tiny", parts=parts, **OPTIONS | {"dtype": "float32", "kv_cache_dtype": dtype} | options)
        params = SamplingParams(temperature=0, max_tokens=6)
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]

    asked = []
    got = tokens(Parts(attention=attention))
    assert got == tokens(None)
    assert asked[-1][1] == (16, 4, 2, 32) and {len(lens) for *_, lens in asked} >= {4}
    with pytest.raises(ValueError, match="use device='cpu' and kv_cache_dtype='float32'"):
        tokens(Parts(attention=attention), kv_cache_dtype="float64")


SAMPLED = [
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(temperature=1.2, top_k=3, seed=1, n=3, max_tokens=10),
    SamplingParams(temperature=0.8, top_p=0.7, seed=2, max_tokens=10, logprobs=2),
    SamplingParams(temperature=1.0, min_p=0.2, seed=3, max_tokens=10, presence_penalty=1.0, min_tokens=8),
]


def test_a_sampler_of_ones_own_draws_our_tokens_though_requests_are_preempted():
    def drawn(parts):
        llm = LLM("tiny", parts=parts, **OPTIONS)
        outputs = llm.generate(PROMPTS, SAMPLED)
        assert llm.stats()["num_preemptions_recompute"] + llm.stats()["num_preemptions_swap"] > 0
        return [[(c.token_ids, c.logprobs) for c in out.outputs] for out in outputs]

    assert drawn(Parts(sampler=sample, step=OTHERS["step"])) == drawn(None)


def test_a_sampler_is_not_asked_where_no_token_can_be_drawn():
    def broken(*args):
        raise AssertionError

    llm = LLM("tiny", parts=Parts(sampler=broken), **OPTIONS)
    llm.engine.runner.model.forward = lambda batch, cache: torch.full((len(batch.logits_indices), 512), float("nan"))
    (output,) = llm.generate(["Why"], SamplingParams(max_tokens=2))
    assert "has nan as its highest value" in output.error
    llm = LLM("tiny", parts=Parts(sampler=broken), **OPTIONS)
    (output,) = llm.generate(["Why"], SamplingParams(max_tokens=2))
    assert "your part `sampler` raised AssertionError" in output.error


# ---- lab 12: functions as somebody else would write them


def norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def turned(x, positions, theta):
    half = x.shape[-1] // 2
    angles = torch.outer(positions.float(), 1.0 / theta ** (torch.arange(half).float() * 2 / x.shape[-1]))
    cos, sin = (t.to(x.dtype)[:, None] for t in (angles.cos(), angles.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def over_pages(q, kv, block_table, seq_len):
    keys, values = kv[:, block_table].flatten(1, 2)[:, :seq_len].repeat_interleave(q.shape[1] // kv.shape[3], dim=2)
    scores = torch.einsum("nhd,lhd->hnl", q, keys) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), seq_len, dtype=torch.bool).triu(seq_len - len(q) + 1)
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def laid_out(seqs, block_size):
    rows = [(i, token, start + j) for i, (tokens, start, *_) in enumerate(seqs) for j, token in enumerate(tokens)]
    lens = [len(tokens) for tokens, *_ in seqs]
    tables = torch.zeros(len(seqs), max(len(blocks) for _, _, blocks, _ in seqs), dtype=torch.int32)
    for row, (_, _, blocks, _) in zip(tables, seqs, strict=True):
        row[: len(blocks)] = torch.tensor(blocks)
    return FlatBatch(
        token_ids=torch.tensor([token for _, token, _ in rows]),
        positions=torch.tensor([position for *_, position in rows]),
        slot_mapping=torch.tensor([seqs[i][2][p // block_size] * block_size + p % block_size for i, _, p in rows]),
        query_start_loc=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
        seq_lens=torch.tensor([start + len(tokens) for tokens, start, *_ in seqs], dtype=torch.int32),
        block_tables=tables,
        logits_indices=torch.tensor(
            [end - 1 for end, seq in zip(accumulate(lens), seqs, strict=True) if seq[3]], dtype=torch.int64
        ),
        num_decodes=len(list(takewhile(lambda n: n == 1, lens))),
        max_query_len=max(lens),
        max_seq_len=max(start + len(tokens) for tokens, start, *_ in seqs),
    )


LAB_12 = {"rms_norm": norm, "rope": turned, "attend": over_pages, "flat_batch": laid_out}
CHUNKED = dict(num_gpu_blocks_override=9, block_size=4, max_model_len=32, max_num_batched_tokens=8)
TIGHT_PROMPTS = [[7, 8, 9, 10, 11] * 2, [7, 8, 9, 10, 11, 4, 5], list(range(20, 30)), [3]]


def run(parts, model="tiny", prompts=TIGHT_PROMPTS, **options):
    """Tokens, prompt log-probabilities and counters: in chunks, with reuse and preemption."""
    llm = LLM(model, parts=parts, **CHUNKED | options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    outputs = llm.generate(prompts, params)
    chosen = [[list(row) for row in out.prompt_logprobs[1:]] for out in outputs]
    return [out.outputs[0].token_ids for out in outputs], chosen, llm.stats()


def test_the_parts_of_lab_12_survive():
    assert [outcome for outcome in survive(Parts(**LAB_12)) if not outcome.survived] == []


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8", "num_gpu_blocks_override": 40},
                                     {"attention_backend": "triton"}], ids=str)  # fmt: skip
def test_a_model_of_parts_says_the_same(options):
    """Alone and all together. Over triton, RMSNorm and RoPE are theirs, and K and V are written by rung 1."""
    if "attention_backend" in options:
        pytest.importorskip("triton")
    choices = [LAB_12] if options else [{name: part} for name, part in LAB_12.items()] + [LAB_12]
    if "attention_backend" in options:
        choices = [{name: LAB_12[name] for name in ("rms_norm", "rope", "flat_batch")}]
    expected = run(None, **options | {"attention_backend": "torch"})
    assert "int8" in options.values() or expected[2]["num_preemptions_recompute"] > 0
    for parts in choices:
        called = dict.fromkeys(parts, 0)
        assert run(Parts(**{name: counted(name, part, called) for name, part in parts.items()}), **options) == expected
        assert all(called.values())


@pytest.mark.parametrize("name", ["rms_norm", "rope", "flat_batch"])
def test_steps_of_parts_are_never_graphs(name):
    """A CUDA graph runs no Python: of a student's function it would keep what the first call launched."""
    assert LLM("tiny", parts=Parts(**{name: LAB_12[name]}), num_gpu_blocks_override=9).config.enforce_eager
    assert not LLM("tiny", parts=Parts(sampler=sample), num_gpu_blocks_override=9).config.enforce_eager


def counted(name, part, called):
    @wraps(part)
    def call(*args):
        called[name] += 1
        return part(*args)

    return call


def test_beside_attention_attend_computes_the_chunks_only():
    lengths = []

    def attend(q, kv, block_table, seq_len):
        lengths.append(len(q))
        return over_pages(q, kv, block_table, seq_len)

    expected = run(None)
    assert run(Parts(attend=attend)) == expected
    assert 1 in lengths and 8 in lengths
    lengths.clear()
    assert run(Parts(attend=attend, attention=paged_attention))[0] == expected[0]
    assert 1 not in lengths and 8 in lengths


def test_a_stretched_rope_is_refused():
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = ModelConfig("llama", 8, 8, 1, 2, 1, 4, 16, 512, rope_scaling=scaling)
    with pytest.raises(ValueError, match="the part `rope` knows theta alone, and this model scales its positions by"):
        Parts(rope=turned).model_ops(config)
    assert Parts(rms_norm=norm).model_ops(config) is not None and Parts(attend=over_pages).model_ops(config) is None


@pytest.mark.parametrize("part", LAB_12)
def test_a_part_of_lab_12_that_fails_is_named(part):
    """In the request's error: a forward that fails must not end the engine."""
    broken = {"rms_norm": lambda x, weight, eps: None, "rope": lambda x, positions, theta: None,
              "attend": lambda q, kv, block_table, seq_len: None, "flat_batch": lambda seqs, block_size: None}
    llm = LLM("tiny", parts=Parts(**{part: broken[part]}), **CHUNKED)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert output.outputs[0].finish_reason == "error"
    assert f"PartError: your part `{part}`: <lambda> returned" in output.error


def test_texts_are_made_by_the_parts():
    class Shouting(Detokenizer):
        def add(self, token_ids, final=False):
            return super().add(token_ids, final).upper()

    class Watching(StopChecker):
        def add(self, text, may_stop=True, final=False):
            seen.append(text)
            return super().add(text, may_stop, final)

    seen = []
    params = SamplingParams(temperature=0, max_tokens=12, stop=("UNIT",))
    plain = LLM("tiny", **OPTIONS).generate("A block", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    parts = Parts(detokenizer=Shouting, stop_checker=Watching)
    text = LLM("tiny", parts=parts, **OPTIONS).generate("A block", params)[0].outputs[0].text
    assert "unit" in plain.text and text == plain.text.upper().partition("UNIT")[0]
    assert "".join(seen).startswith(text)
    broken = Parts(detokenizer=type("Mine", (Detokenizer,), {"add": lambda self, token_ids, final=False: None}))
    with pytest.raises(PartError, match="your part `detokenizer`: Mine.add returned None: return text"):
        LLM("tiny", parts=broken, **OPTIONS).generate("A block", params)


def test_on_a_cpu_ours_gives_what_the_pool_holds():
    config = EngineConfig(device="cpu", max_num_seqs=100_000, max_model_len=2048)
    model_config = LLM("tiny", **OPTIONS).model_config
    block_bytes = kv_bytes_per_token(model_config, torch.float32) * config.block_size
    assert memory.plan_blocks(config, model_config, torch.float32) == (memory.CPU_POOL_BYTES // block_bytes, 0)


def test_the_error_of_a_part_comes_out_of_generate_with_its_own_traceback():
    llm = LLM("tiny", parts=Parts(free_queue=mine(ListQueue, append_n=raising, append=raising)), **OPTIONS)
    with pytest.raises(PartError, match="your part `free_queue` raised KeyError in Mine.append_n") as caught:
        llm.generate(PROMPTS, PARAMS)
    assert caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "raising"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ListQueue}, "give a kvlab.Parts"),
        ({"parts": Parts(), "policies": object()}, "policies and parts are both given"),
    ],
)
def test_what_is_no_parts_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("tiny", **options)
