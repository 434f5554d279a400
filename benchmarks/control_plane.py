"""What the control plane costs, without any model: microseconds a step, block operations a second, hashing.

    python benchmarks/control_plane.py            the figures        (--json FILE writes them down)
    python benchmarks/control_plane.py --profile  where the time of a step goes

A step is schedule() and update_from_output() with 256 running decodes, block size 16, contexts of about 500
tokens and prefix caching on, so that every step also grows and publishes 16 blocks. Between the two the model
runner lays out its inputs (ModelRunner.prepare and lay_out: all that the host does before the forward, but for what
the sampler asks), which is counted apart. The same again with a queue of requests that wait for a seat. One thread;
minima and medians over the steps, best rounds for blocks and hashing.
"""

import argparse
import cProfile
import json
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from offline import processor, versions

from kvlab.blocks import BlockPool
from kvlab.config import EngineConfig
from kvlab.engine.runner import ModelRunner
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache
from kvlab.prefix import HashChainIndex
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler

NUM_SEQS, NUM_WAITING, CONTEXT, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 256, 500, 500, 16, 20_000, 4096


class Decodes:
    """A scheduler with NUM_SEQS requests in the middle of their outputs, and the runner that prepares its steps."""

    def __init__(self, num_waiting: int = 0):
        config = EngineConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS, max_num_seqs=NUM_SEQS,
                              max_num_batched_tokens=8192)  # fmt: skip
        self.scheduler = Scheduler(config)
        smallest = ModelConfig("qwen2", 8, 8, 1, 1, 1, 2, 16, MAX_LEN)  # nothing is computed with it
        kv_cache = KVCache(smallest, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
        self.runner = ModelRunner(None, kv_cache, NUM_SEQS, MAX_LEN)
        for i in range(NUM_SEQS + num_waiting):  # prompts of different lengths
            prompt = [(i * 7919 + j * 31) % 50_000 for j in range(CONTEXT - BLOCK_SIZE + i % (2 * BLOCK_SIZE))]
            self.scheduler.add_request(Request(str(i), prompt, SamplingParams(max_tokens=2000)))
        while sum(r.num_output_tokens > 0 for r in self.scheduler.running) < NUM_SEQS:
            self.step()

    def step(self) -> tuple[float, float, float]:
        """One step with made-up tokens; seconds for schedule(), prepare() and update_from_output()."""
        start = perf_counter()
        output = self.scheduler.schedule()
        scheduled = perf_counter()
        prepared_step = self.runner.prepare(output)
        self.runner.lay_out(prepared_step)
        prepared = perf_counter()
        sampled = {r.request_id: [(r.num_tokens * 97 + r.arrival) % 50_000] for r in prepared_step.samplers}
        before_update = perf_counter()
        self.scheduler.update_from_output(output, sampled)
        return scheduled - start, prepared - scheduled, perf_counter() - before_update


def measure(num_waiting: int, num_steps: int = 400) -> dict[str, dict[str, float]]:
    """{part of a step: {"min", "median"}} in microseconds, over `num_steps` steps."""
    decodes = Decodes(num_waiting)
    schedule, prepare, update = zip(*(decodes.step() for _ in range(num_steps)), strict=True)
    step = list(map(sum, zip(schedule, update, strict=True)))
    parts = {"schedule": schedule, "update": update, "schedule + update": step, "prepare": prepare,
             "step with input preparation": list(map(sum, zip(step, prepare, strict=True)))}  # fmt: skip
    return {name: {"min": round(min(times) * 1e6, 1), "median": round(statistics.median(times) * 1e6, 1)}
            for name, times in parts.items()}  # fmt: skip


def block_operations(num_rounds: int = 2000, batch: int = 64) -> float:
    """Blocks handed out and freed again, a second, in the best of `num_rounds`."""
    pool = BlockPool(10_000)
    times = []
    for _ in range(num_rounds):
        start = perf_counter()
        pool.free_blocks(reversed(pool.get_new_blocks(batch)))
        times.append(perf_counter() - start)
    return batch / min(times)


def hashing(num_tokens: int = 4096, num_rounds: int = 50) -> list[float]:
    """Seconds to look for a prompt of num_tokens whose blocks are all cached: it hashes every one."""
    pool = BlockPool(1 + num_tokens // BLOCK_SIZE, prefix_index=(index := HashChainIndex(BLOCK_SIZE)))
    tokens = list(range(num_tokens))
    index.insert(tokens, pool.get_new_blocks(num_tokens // BLOCK_SIZE))
    times = []
    for _ in range(num_rounds):
        start = perf_counter()
        assert len(index.match(tokens)) == num_tokens // BLOCK_SIZE
        times.append(perf_counter() - start)
    return times


def profile(num_steps: int = 300) -> None:
    decodes, profiler = Decodes(), cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        decodes.step()
    profiler.disable()
    profiler.print_stats("tottime")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="print where the time of 300 steps goes")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.profile:
        return profile()
    steps = {f"{NUM_SEQS} decodes": measure(0), f"{NUM_SEQS} decodes, {NUM_WAITING} waiting": measure(NUM_WAITING)}
    blocks, hashed = block_operations(), min(hashing()) * 1e6
    for name, parts in steps.items():
        print(f"one step, {name}; microseconds:")
        for part, times in parts.items():
            print(f"  {part:28} min {times['min']:6.0f}, median {times['median']:6.0f}")
    print(f"allocate and free: {blocks / 1e6:.2f} million blocks a second")
    print(f"hash 4096 tokens: {hashed:.0f} microseconds")
    if args.json:
        report = {"command": " ".join(sys.argv), "unit": "microseconds", "steps": steps,
                  "blocks_per_s": round(blocks), "hash_4096_tokens": round(hashed, 1), "cpu": processor(),
                  "cores": os.cpu_count(), "versions": versions()}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
