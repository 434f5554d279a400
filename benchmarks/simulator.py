"""How fast the simulator is: requests for each second of CPU time, by plain stepping on one core.

    python benchmarks/simulator.py          5,000 requests each way; seconds
    python benchmarks/simulator.py --full   100,000, as the target has it: under 60 s   (--json FILE writes it down)

A closed batch of requests with outputs of 200 tokens on average (uniform, 100 to 300) and prompts of as many, so that
256 run from the start nearly to the end. Priced as Llama-3-8B on an H100. Four ways: as it is; with every policy, the
free queue and the block pool replaced and guarded, as a student's are; with prefix caching; with both.
CPU time, for other work on the machine would count in the time on the wall.
"""

import argparse
import json
import os
import resource
import sys
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

from offline import processor, versions

from kvlab.blocks import BlockPool, FreeKVCacheBlockQueue
from kvlab.config import EngineConfig
from kvlab.costs import GPUCost
from kvlab.parts import Parts
from kvlab.sim import Simulator, Uniform, Workload, make_workload

NUM_SEQS, NUM_BLOCKS, BUDGET = 256, 12_000, 2048


# What a student may write: not slower than need be, not tuned either.


def admit(num_running, max_num_seqs, batch_is_forming):
    return num_running < max_num_seqs


def plan_tokens(pending, budget, limit):
    plan = [0] * len(pending)
    for decode in (True, False):
        for i, tokens in enumerate(pending):
            if (tokens == 1) == decode:
                plan[i] = min(tokens, limit, budget)
                budget -= plan[i]
    return plan


def choose_victim(running, needy, gain):
    return max(running, key=lambda request: request.sort_key)


def swap_or_recompute(request, num_blocks, num_free_cpu_blocks):
    return "recompute"


def may_resume(request, room):
    return room.num_growing == 0 or room.needed + room.promised + room.num_growing <= room.free


class Queue(FreeKVCacheBlockQueue):
    def popleft_n(self, n):
        return [self.popleft() for _ in range(n)]


class Pool(BlockPool):
    def free_blocks(self, ordered_blocks):
        for block in list(ordered_blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.append(block)


PARTS = Parts(admit=admit, plan_tokens=plan_tokens, choose_victim=choose_victim, swap_or_recompute=swap_or_recompute,
              may_resume=may_resume, free_queue=Queue, block_pool=Pool)  # fmt: skip


def measure(workload: Workload, caching: bool, parts: Parts | None) -> dict[str, float]:
    """Simulate it once: seconds, rates, and what shows that the run was the one meant."""
    config = EngineConfig(num_gpu_blocks_override=NUM_BLOCKS, max_num_seqs=NUM_SEQS, max_num_batched_tokens=BUDGET,
                          enable_prefix_caching=caching)  # fmt: skip
    simulator = Simulator(config, GPUCost.of("H100", "Llama-3-8B"), parts)
    began, wall = process_time(), perf_counter()
    result = simulator.run(workload)
    cpu, wall = process_time() - began, perf_counter() - wall
    found = result.summary()
    assert found["finished"] == len(workload)
    return {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2), "requests_per_cpu_s": round(len(workload) / cpu),
            "steps": found["steps"], "us_per_step": round(cpu / found["steps"] * 1e6, 1),
            "running": round(found["running"], 1), "preemptions": found["preemptions"],
            "simulated_s": round(found["makespan_s"], 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="100,000 requests instead of 5,000")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    number = 100_000 if args.full else 5_000
    workload = make_workload(number, Uniform(100, 300), Uniform(100, 300), seed=0)
    ways = {"ours": (False, None), "parts replaced": (False, PARTS), "prefix caching": (True, None),
            "prefix caching, parts replaced": (True, PARTS)}  # fmt: skip
    results = {}
    for name, (caching, parts) in ways.items():
        results[name] = found = measure(workload, caching, parts)
        print(f"{name:32} {found['cpu_s']:7.2f} s CPU ({found['wall_s']:.2f} s), {found['requests_per_cpu_s']:6,} "
              f"requests/s, {found['us_per_step']:.0f} us/step, {found['running']:.0f} run", flush=True)  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"memory at most: {peak:.0f} MiB; load now {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if args.json:
        report = {"command": "python benchmarks/simulator.py" + " --full" * args.full, "requests": number,
                  "results": results, "peak_mib": round(peak), "cpu": processor(),
                  "cores": os.cpu_count(), "load": os.getloadavg()[0], "versions": versions()}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
