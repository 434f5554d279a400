"""Lab 13's runs: one seeded request in several company, a step under the clock, a step's memory, the whole ladder.

    reply      what a seeded request says, alone or not, preempted or not
    anatomy    where the time of a decode step goes, measured on this machine
    peak_bytes memory that one step of the shipped model takes beyond weights and K/V, counted
    climb      one rung of the ladder by the engine (measured), simulate: by the simulator (a GPU's cost, exact)
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from kvlab.config import EngineConfig
from kvlab.costs import GPUCost
from kvlab.parts import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.sim import Poisson, Simulator, Workload, make_workload
from kvlab.sim.result import quantiles
from kvlab.sim.workload import NS, Lognormal
from kvlab.sizing import GB, model_shape, num_gpu_blocks
from kvlab.tiny import load_glossary

ASKED = "Question: Why does paging help?\nAnswer:"
OTHERS = ("What is a block table?", "Why is a pool full?", "The scheduler", "Tell me more about the free queue.")


def _llm(parts: Parts | None = None, **options: Any) -> Any:
    from kvlab.engine import LLM

    return LLM("tiny", parts=parts, device="cpu", **{"block_size": 16, "max_model_len": 384} | options)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread, so that the model's small steps do not wait for one another's threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Reply(NamedTuple):
    """A seeded request's answer. preempted: how often it had to give way."""

    text: str
    tokens: list[int]
    preempted: int


def reply(parts: Parts | None = None, *, neighbours: int = 0, blocks: int = 96, n: int = 1, budget: int = 128,
          max_tokens: int = 24) -> Reply:  # fmt: skip
    """What the request with seed 7 says (of n samples the first), behind `neighbours` others, in `blocks` blocks."""
    llm = _llm(parts, num_gpu_blocks_override=blocks + 1, max_num_batched_tokens=budget, block_size=4,
               enable_prefix_caching=False, max_model_len=128)  # fmt: skip
    for i in range(neighbours):
        llm.add_request(OTHERS[i % len(OTHERS)], SamplingParams(temperature=1.0, seed=100 + i, max_tokens=40))
    request = llm.add_request(ASKED, SamplingParams(temperature=1.0, seed=7, n=n, max_tokens=max_tokens))
    with one_thread():
        while llm.has_unfinished_requests():
            llm.step()
    if request.error:
        raise RuntimeError(request.error)
    tokens = list(request.output_token_ids)
    return Reply(llm.tokenizer.decode(tokens), tokens, request.num_preemptions)


# ---- one step under the clock

STAGES = ("schedule", "prepare", "forward", "sample", "update", "text")


def anatomy(num_seqs: int, prompt: int = 24, steps: int = 24, chunk: int = 0) -> dict[str, float]:
    """Seconds of each of STAGES, and "other": medians over `steps` steps in which `num_seqs` requests decode.

    chunk: tokens of a prompt that is computed beside them in every step; 0 for none. One CPU thread.
    """
    llm = _llm(num_gpu_blocks_override=num_seqs * 12 + 2 + steps * (chunk // 16 + 2), max_num_seqs=num_seqs + steps + 1,
               max_num_batched_tokens=num_seqs + max(chunk, 1) * 2 + prompt, enable_prefix_caching=False)  # fmt: skip
    core, runner, spent = llm.engine, llm.engine.runner, dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, function: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            begun = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage] += perf_counter() - begun

        return wrapped

    places = [("schedule", core.scheduler, "schedule"), ("prepare", runner, "prepare"), ("prepare", runner, "lay_out"),
              ("forward", llm.model, "forward"), ("sample", runner, "sampler"),
              ("update", core.scheduler, "update_from_output"), ("text", llm.processor, "process")]  # fmt: skip
    for stage, owner, name in places:
        setattr(owner, name, timed(stage, getattr(owner, name)))

    def add(tokens: int, outputs: int, seed: int) -> None:
        ids = [5 + (seed + i) % 500 for i in range(tokens)]
        llm.add_request(ids, SamplingParams(temperature=0.8, seed=seed, max_tokens=outputs, ignore_eos=True))

    found: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "other")}
    with one_thread():
        for i in range(num_seqs):
            add(prompt, 3 * steps + 40, i)
        while any(r.num_output_tokens < 2 for r in core.scheduler.requests.values()):
            llm.step()
        for i in range(steps):
            if chunk:
                add(chunk, 1, i)
            spent.update(dict.fromkeys(STAGES, 0.0))
            begun = perf_counter()
            llm.step()
            whole = perf_counter() - begun
            for stage in STAGES:
                found[stage].append(spent[stage])
            found["other"].append(whole - sum(spent.values()))
    return {stage: median(values) for stage, values in found.items()}


# ---- the memory of one step


def peak_bytes(counts: Sequence[int]) -> int:
    """Most bytes of tensors alive at once while a step computes `counts` tokens of so many new requests.

    Weights, K/V and what was there before do not count; nor does what a kernel takes inside itself. CPU, float32.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.known, self.now, self.most = {}, 0, 0

        def see(self, values: Any, is_new: bool) -> None:
            for value in tree_leaves(values):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    if storage._cdata not in self.known:
                        size = storage.nbytes() if is_new else 0
                        self.known[storage._cdata] = weakref.finalize(storage, self.gone, storage._cdata, size)
                        self.now += size
                        self.most = max(self.most, self.now)

        def gone(self, key: int, size: int) -> None:
            self.known.pop(key, None)
            self.now -= size

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.see((args, kwargs), False)
            result = function(*args, **(kwargs or {}))
            self.see(result, True)
            return result

    llm = _llm(num_gpu_blocks_override=2 + sum(-(-count // 16) + 1 for count in counts), max_num_seqs=len(counts),
               max_num_batched_tokens=max(sum(counts), len(counts)), enable_prefix_caching=False,
               max_model_len=max(counts) + 1)  # fmt: skip
    for count in counts:
        llm.add_request([7] * count, SamplingParams(max_tokens=1))
    with one_thread(), Counting() as counting:
        llm.step()
    assert not llm.has_unfinished_requests()
    return counting.most


# ---- the ladder

STATIC = {"batching": "static", "enable_prefix_caching": False, "enable_chunked_prefill": False}
RUNGS: dict[str, dict[str, Any]] = {  # the budget: a whole prompt without chunks, else a quarter of it
    "contiguous": {**STATIC, "reservation": "contiguous"},
    "+ pages": STATIC,
    "+ continuous": {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    "+ chunks": {"enable_prefix_caching": False},
    "+ prefix cache": {},
}


class Row(NamedTuple):
    """One rung on one trace. Times in seconds; ttft at two quantiles; running: the mean over steps.

    filled: tokens with K/V over slots of owned blocks, the mean over steps; above 1 where blocks are shared.
    """

    steps: int
    makespan: float
    tokens_per_s: float
    ttft_p50: float
    ttft_p95: float
    longest_gap: float
    running: float
    filled: float
    computed: int


def _options(rung: str, whole_prompt: int) -> dict[str, Any]:
    options = RUNGS[rung]
    chunked = options.get("enable_chunked_prefill", True)
    return {**options, "max_num_batched_tokens": whole_prompt // 4 if chunked else whole_prompt}


def _fits(request: Any, room: Any) -> bool:
    return room.needed <= room.free


def _parts(rung: str, parts: Parts | None) -> Parts:
    """A reservation never grows, so spare blocks would only hold it back."""
    return (parts or Parts()) | (Parts(may_resume=_fits) if rung == "contiguous" else Parts())


def climb(rung: str, parts: Parts | None = None, blocks: int = 96) -> tuple[Row, dict[str, list[int]]]:
    """24 chats, long answers and short, all at once, on one rung: what was measured, and every answer's tokens."""
    llm = _llm(_parts(rung, parts), num_gpu_blocks_override=blocks + 1, max_num_seqs=24, **_options(rung, 384))
    scheduler, size = llm.engine.scheduler, llm.config.block_size
    requests = []
    for i, entry in enumerate(load_glossary()[:24]):
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": entry["question"]}])
        params = SamplingParams(temperature=0.8, seed=i, n=3 if i == 5 else 1, max_tokens=(96, 12, 64, 8)[i % 4])
        requests.append(llm.add_request(prompt, params))
    came: dict[str, list[float]] = {}
    answers: dict[str, list[int]] = {}
    running, owned, filled = 0, 0, 0
    with one_thread():
        begun = perf_counter()
        while llm.has_unfinished_requests():
            results = llm.engine.step()
            now = perf_counter() - begun
            for result in results:
                came.setdefault(result.request.request_id, []).append(now)
                answers.setdefault(result.request.request_id, []).extend(result.new_token_ids)
            tables = scheduler.manager.req_to_blocks
            running += len(scheduler.running)
            owned += len({block.block_id for r in scheduler.running for block in tables[r.request_id]})
            filled += sum(r.num_computed_tokens for r in scheduler.running)
    if errors := [r.error for r in requests if r.error]:
        raise RuntimeError(errors[0])
    first = sorted(times[0] for times in came.values())
    gaps = [b - a for times in came.values() for a, b in zip(times, times[1:], strict=False)]
    steps, tokens = scheduler.stats.num_steps, sum(map(len, came.values()))
    row = Row(steps, now, tokens / now, median(first), first[int(0.95 * len(first))], max(gaps), running / steps,
              filled / (owned * size), scheduler.stats.num_scheduled_tokens)  # fmt: skip
    return row, answers


def traffic(rate: float | None, number: int = 300) -> Workload:
    """Chats of one service, `rate` a second (None: all at once): 320 tokens of shared instructions, then a question.

    Questions have 120 tokens on average and up to 1,000, answers 200 and up to 600.
    """
    return make_workload(number, Lognormal(120, 1.0, most=1000), Lognormal(200, 0.9, most=600),
                         Poisson(rate) if rate else None, seed=1, prefix_tokens=320)  # fmt: skip


def gpu_blocks(gpu_bytes: int = 80 * GB, model: str = "Llama-2-13B") -> int:
    """num_gpu_blocks of `model` on a GPU with so many bytes: 0.9 of it, less weights and 2 GB for activations."""
    shape = model_shape(model)
    return num_gpu_blocks(gpu_bytes, 0.9, shape.weight_bytes(), 2 * GB, 0, 16 * shape.kv_bytes_per_token())


def simulate(rung: str, workload: Workload, *, gpu: str = "A100", model: str = "Llama-2-13B",
             longest: int = 2048) -> Row:  # fmt: skip
    """`workload` on one rung in the simulator: `longest` tokens at most, 256 seats, the whole 80 GB of `gpu`."""
    config = EngineConfig(block_size=16, num_gpu_blocks_override=gpu_blocks(model=model), max_num_seqs=256,
                          max_model_len=longest, num_cpu_blocks_override=0, **_options(rung, longest))  # fmt: skip
    result = Simulator(config, GPUCost.of(gpu, model), _parts(rung, None)).run(workload)
    found = result.summary()
    ttft = [ns / NS for ns in quantiles(result.distributions["ttft"], (0.5, 0.95))]
    return Row(found["steps"], found["makespan_s"], found["output_tokens_per_s"], *ttft,
               max(result.distributions["itl"]) / NS, found["running"], found["kv_filled"],
               result.stats.num_scheduled_tokens)  # fmt: skip
