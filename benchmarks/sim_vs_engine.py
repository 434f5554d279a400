"""Simulation against reality: one closed batch through the engine on this machine and through the calibrated simulator.

    python benchmarks/sim_vs_engine.py [--model tiny] [--rounds 6] [--json FILE]

A batch of requests goes through the engine with three pools: an ample one, one that preempts by recomputation and one
that swaps. Each round runs all three, then the workloads of kvlab.calibrate, none of which is this batch, then all
three again. The cost is fitted to the calibration, and `Simulator` runs the batch with it. The steps' work must be
equal to the last count; makespan and mean TPOT are compared. (Taking turns, both see the same machine, whatever else it
does meanwhile.)

One thread. The engine's clock is the process's CPU time, which on a quiet machine is the time on the wall and on a
busy one leaves out waiting for a core; the wall's time is printed beside it, with the cores that the process had.
The engine's figures are means over its runs, as the calibration's are over those of each step: means of steps add up to
the mean of a run. Beside them stands their standard error: what a machine that others use lets one know.
"""

import argparse
import json
import os
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from offline import processor, versions

from kvlab import LLM
from kvlab.calibrate import DEFAULTS, Calibrator, Load, TimedStep, spread, timed_steps
from kvlab.costs import FittedCost, StepWork
from kvlab.sim import Simulator, closed_batch

POOLS = {
    "ample": dict(num_gpu_blocks_override=2000, num_cpu_blocks_override=0),
    "recompute": dict(num_gpu_blocks_override=110, num_cpu_blocks_override=0),
    "swap": dict(num_gpu_blocks_override=110, num_cpu_blocks_override=400),
}
COUNTED = ("num_preemptions_recompute", "num_preemptions_swap", "num_recomputed_tokens", "num_swapped_out_blocks",
           "num_swapped_in_blocks", "num_scheduled_tokens")  # fmt: skip


class Noted:
    """A cost that notes the work of every step."""

    def __init__(self, cost: FittedCost):
        self.cost, self.works = cost, []

    def step_seconds(self, work: StepWork) -> float:
        self.works.append(work)
        return self.cost.step_seconds(work)


def make_load(number: int, longest: int, seed: int = 0) -> Load:
    rng = random.Random(seed)
    prompts, outputs = min(200, longest // 2), min(200, longest // 2)
    return [(rng.randint(8, prompts), rng.randint(8, outputs)) for _ in range(number)]


def mean_tpot(steps: list[TimedStep]) -> float:
    """Seconds between a request's tokens, its mean, averaged over requests; a token comes at the end of its step."""
    now, times = 0.0, {}
    for step in steps:
        now += step.seconds
        for request_id in step.sampled:
            times.setdefault(request_id, []).append(now)
    return statistics.mean((t[-1] - t[0]) / (len(t) - 1) for t in times.values() if len(t) > 1)


def standard_error(values: list[float]) -> float:
    """Of their mean, as a share of it; nan for a single one."""
    if len(values) < 2:
        return float("nan")
    return statistics.stdev(values) / len(values) ** 0.5 / statistics.mean(values)


class Reality:
    """The engine with one pool, and what its runs of the load took."""

    def __init__(self, model: str, pool: dict, load: Load):
        self.llm, self.load = LLM(model, **DEFAULTS | pool), load
        timed_steps(self.llm, load[:2])
        self.before, self.runs, self.walls = self.llm.stats(), [], []

    def run(self) -> None:
        start = perf_counter()
        self.runs.append(timed_steps(self.llm, self.load))
        self.walls.append(perf_counter() - start)

    def compare(self, cost: FittedCost) -> dict:
        """The engine's figures and the simulator's."""
        steps, stats = self.runs[0], self.llm.stats()
        counts = {name: (stats[name] - self.before[name]) / len(self.runs) for name in COUNTED}
        noted = Noted(cost)
        result = Simulator(self.llm.config, noted).run(closed_batch(self.load))
        makespans = [sum(step.seconds for step in run) for run in self.runs]
        tpots = list(map(mean_tpot, self.runs))
        real, tpot = statistics.mean(makespans), statistics.mean(tpots)
        simulated_tpot = statistics.mean(r.tpot_ns for r in result.records if r.tpot_ns is not None) / 1e9
        return {
            "steps": len(steps), "steps_simulated": len(noted.works),
            "same_work": all(noted.works == [step.work for step in run] for run in self.runs),
            "counts": counts, "same_counts": all(counts[name] == getattr(result.stats, name) for name in COUNTED),
            "makespan_s": real, "makespan_simulated_s": result.makespan_s,
            "makespan_error": result.makespan_s / real - 1, "makespans_s": makespans,
            "makespan_uncertainty": standard_error(makespans),
            "tpot_s": tpot, "tpot_simulated_s": simulated_tpot, "tpot_error": simulated_tpot / tpot - 1,
            "tpot_uncertainty": standard_error(tpots),
            "wall_s": self.walls, "cores": [cpu / wall for cpu, wall in zip(makespans, self.walls, strict=True)],
        }  # fmt: skip


def show(name: str, row: dict) -> None:
    preempted = row["counts"]["num_preemptions_recompute"] + row["counts"]["num_preemptions_swap"]
    same = lambda flag: "equal" if flag else "DIFFERENT"  # noqa: E731
    print(f"\n{name}: {row['steps']} steps, {preempted:g} preemptions; simulated {row['steps_simulated']} steps; "
          f"every step's work {same(row['same_work'])}, counts {same(row['same_counts'])}")  # fmt: skip
    for what, scale, unit in (("makespan", 1, "s"), ("tpot", 1e3, "ms")):
        real, simulated = row[f"{what}_s"] * scale, row[f"{what}_simulated_s"] * scale
        error, uncertainty = row[f"{what}_error"], row[f"{what}_uncertainty"]
        print(f"  {what:9} engine {real:8.3f} {unit:2} (+-{uncertainty:.1%})  simulated {simulated:8.3f} {unit:2}  "
              f"{error:+.1%}")  # fmt: skip
    runs = row["makespans_s"]
    print(f"  {len(runs)} runs, from {min(runs):.3f} to {max(runs):.3f} s; on the wall "
          f"{statistics.mean(row['wall_s']):.3f} s with {statistics.mean(row['cores']):.2f} cores")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="'tiny', or a model's folder")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    calibrator = Calibrator(args.model)
    load = make_load(args.requests, calibrator.llm.config.max_model_len)
    realities = {name: Reality(args.model, pool, load) for name, pool in POOLS.items()}
    for _ in range(args.rounds):
        for reality in realities.values():
            reality.run()
        calibrator.run()
        for reality in realities.values():
            reality.run()
    found = calibrator.result()
    fitted = spread(found.errors())
    print(f"calibrated on {len(found.steps)} steps: off by {fitted[0]:.1%} in the median, {fitted[1]:.1%} at p90")
    prompts, outputs = map(sum, zip(*load, strict=True))
    print(f"{len(load)} requests at once, {prompts} prompt and {outputs} output tokens")
    rows = {name: reality.compare(found.cost) for name, reality in realities.items()}
    for name, row in rows.items():
        show(name, row)
    print(f"\nload average {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    if args.json:
        report = {"command": " ".join(sys.argv), "pools": rows, "seconds_per": found.cost.seconds_per,
                  "fit_errors": fitted, "load_average": [load_before[0], os.getloadavg()[0]],
                  "cpu": processor(), "cores": os.cpu_count(), "versions": versions()}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
