"""What the control plane costs, without any model: microseconds a step, block operations a second, hashing.

    python benchmarks/control_plane.py            the figures
    python benchmarks/control_plane.py --profile  where the time of a step goes

A step is schedule() and update_from_output() with 256 running decodes, block size 16, contexts of about 500
tokens and prefix caching on, so that every step also grows and publishes 16 blocks.
"""

import argparse
import cProfile
import statistics
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvlab.blocks import BlockPool
from kvlab.config import EngineConfig
from kvlab.prefix import HashChainIndex
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler

NUM_SEQS, CONTEXT, BLOCK_SIZE = 256, 500, 16


def running_decodes() -> Scheduler:
    """A scheduler with NUM_SEQS requests in the middle of their outputs, prompts of different lengths."""
    config = EngineConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=20_000, max_num_seqs=NUM_SEQS,
                          max_num_batched_tokens=8192)  # fmt: skip
    scheduler = Scheduler(config)
    for i in range(NUM_SEQS):
        prompt = [(i * 7919 + j * 31) % 50_000 for j in range(CONTEXT - BLOCK_SIZE + i % (2 * BLOCK_SIZE))]
        scheduler.add_request(Request(str(i), prompt, SamplingParams(max_tokens=2000)))
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.requests.values()):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """One step with made-up tokens; seconds for schedule() and for update_from_output()."""
    start = perf_counter()
    output = scheduler.schedule()
    middle = perf_counter()
    ends = [(r, n) for r, n in output.scheduled if r.num_computed_tokens + n == r.num_tokens]
    sampled = {r.request_id: [(r.num_tokens * 97 + r.arrival) % 50_000] for r, _ in ends}
    before_update = perf_counter()
    scheduler.update_from_output(output, sampled)
    return middle - start, perf_counter() - before_update


def microseconds(seconds) -> float:
    return statistics.median(seconds) * 1e6


def block_operations(num_rounds: int = 2000, batch: int = 64) -> float:
    """Blocks handed out and freed again, a second."""
    pool = BlockPool(10_000)
    start = perf_counter()
    for _ in range(num_rounds):
        pool.free_blocks(reversed(pool.get_new_blocks(batch)))
    return num_rounds * batch / (perf_counter() - start)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="print where the time of 300 steps goes")
    scheduler = running_decodes()
    if parser.parse_args().profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(300):
            step(scheduler)
        profile.disable()
        profile.print_stats("tottime")
        return
    schedule, update = zip(*(step(scheduler) for _ in range(400)), strict=True)
    both = [a + b for a, b in zip(schedule, update, strict=True)]
    print(f"one step, {NUM_SEQS} decodes: {microseconds(both):8.0f} us (schedule {microseconds(schedule):.0f}, "
          f"update {microseconds(update):.0f}), median of {len(both)}")  # fmt: skip
    print(f"allocate and free:      {block_operations() / 1e6:8.2f} million blocks a second")
    print(f"hash 4096 tokens:       {microseconds(hashing()):8.0f} us")


if __name__ == "__main__":
    main()
