"""What a step costs in seconds, and what a preemption costs by swap and by recomputation (L33 3.4, 4, 5). Plain Python.

    SchedulerOutput --work_of--> StepWork --cost.step_seconds--> seconds
                                 (counts)  '-cost.explain------> Breakdown: the parts, and what bounds them

    GPUCost        from first principles: bytes, FLOP, launches, transfers, for a named GPU and model
    FittedCost     fitted to measured steps (`kvlab calibrate`), in JSON
    budget         what a chunk costs, the knee, the largest chunk within a limit of time
    preemption     swap_seconds, recompute_seconds, and where they cross; preemption_steps: the same as lab 09 builds it
"""

from kvlab.costs.fitted import FittedCost, fit
from kvlab.costs.gpu import GPUCost
from kvlab.costs.preemption import (
    crossover_bandwidth,
    crossover_kv_heads,
    crossover_tokens,
    crossover_transfer_bytes,
    recompute_seconds,
    swap_advantage,
    swap_seconds,
    transfer_seconds,
)
from kvlab.costs.work import Breakdown, Part, StepCost, StepWork, work_of, work_of_step

__all__ = [
    "Breakdown",
    "FittedCost",
    "GPUCost",
    "Part",
    "StepCost",
    "StepWork",
    "crossover_bandwidth",
    "crossover_kv_heads",
    "crossover_tokens",
    "crossover_transfer_bytes",
    "fit",
    "recompute_seconds",
    "swap_advantage",
    "swap_seconds",
    "transfer_seconds",
    "work_of",
    "work_of_step",
]
