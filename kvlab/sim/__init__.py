"""The real scheduler and manager without a model: a virtual clock in its place, or stand-ins for it. Plain Python.

    Simulator(config, costs, parts).run(workload) -> SimResult      how long everything takes
    SlotEchoRunner                                                  whether every token is right
"""

from kvlab.sim.result import SLO, RequestRecord, SimResult
from kvlab.sim.simulator import ConstantCost, Simulator
from kvlab.sim.slot_echo import SlotEchoRunner, echo_generate, echo_logprobs
from kvlab.sim.speculation import Speculation
from kvlab.sim.traces import read_trace
from kvlab.sim.workload import (
    Arrival,
    Bursts,
    ClosedBatch,
    Empirical,
    Fixed,
    Lognormal,
    Poisson,
    Uniform,
    Workload,
    closed_batch,
    make_workload,
)

__all__ = [
    "SLO",
    "Arrival",
    "Bursts",
    "ClosedBatch",
    "ConstantCost",
    "Empirical",
    "Fixed",
    "Lognormal",
    "Poisson",
    "RequestRecord",
    "SimResult",
    "Simulator",
    "SlotEchoRunner",
    "Speculation",
    "Uniform",
    "Workload",
    "closed_batch",
    "echo_generate",
    "echo_logprobs",
    "make_workload",
    "read_trace",
]
