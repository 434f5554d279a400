"""Scheduling (L33 3-5): who runs in the next step, with how many tokens, and who must step back. Labs 07-09.

    Request --add_request--> RequestQueue (waiting) --admit--> running --stop--> finished
                                   ^                              |
                                   +------ preempt (swap, recompute)

lifecycle says what can happen to a request, on_paper what batching does to requests of known length (lab 07).
Plain Python: no tensors. What it decides is a SchedulerOutput; how it decides is in Policies, which a lab replaces.
"""

from kvlab.schedule.beam import BeamGroup, beam_request
from kvlab.schedule.held import HeldSequence
from kvlab.schedule.output import EngineCoreOutput, SampledTokens, SchedulerOutput, SchedulerStats
from kvlab.schedule.policies import Policies
from kvlab.schedule.queue import RequestQueue
from kvlab.schedule.request import Request, RequestStatus
from kvlab.schedule.scheduler import Scheduler

__all__ = [
    "BeamGroup",
    "EngineCoreOutput",
    "HeldSequence",
    "Policies",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "SampledTokens",
    "Scheduler",
    "SchedulerOutput",
    "SchedulerStats",
    "beam_request",
]
