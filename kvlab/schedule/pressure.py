"""Pressure: blocks have run out, so somebody gives way (抢占; L33 5; lab 09).

    choose_victim -> swap_or_recompute -> swapped: its K/V waits on the CPU, or dropped: its tokens are computed again
                                       -> either way it waits, at its own place in the queue
"""

from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.schedule import group as whole
from kvlab.schedule.group import Scheduled
from kvlab.schedule.outcome import StepOutcome
from kvlab.schedule.output import SchedulerOutput
from kvlab.schedule.policies import Policies
from kvlab.schedule.request import Request, RequestStatus


class Pressure(StepOutcome):
    """Takes running requests off the GPU, by the policies' choice."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, policies: Policies, recorder: Recorder | None):
        super().__init__(config, manager, recorder)
        self.policies = policies

    def _choose_victim(self, needy: Request) -> Request:
        idle = self._reclaimable(needy)  # what only they share with the victim is as good as free
        gain = lambda request: self.manager.num_blocks_freed_by([*whole.companions(request), *idle])  # noqa: E731
        victim = self.policies.choose_victim(self.running, needy, gain)
        if victim not in self.running:
            raise ValueError(f"choose_victim returned {victim!r}, which is not running: return one of those given")
        return victim

    def _preempt_whole(self, victim: Request, needy: Request, scheduled: Scheduled, output: SchedulerOutput) -> None:
        """Preempt `victim`, and with a beam its whole group, because `needy` found no room."""
        if self.recorder is not None:
            self.recorder.emit("victim", victim.request_id, (needy.request_id,))
        for request in whole.companions(victim):
            self._preempt(request, scheduled, output)

    def _preempt(self, victim: Request, scheduled: Scheduled, output: SchedulerOutput) -> None:
        """Take `victim` off the GPU and out of the step; it waits at its own place in the queue (L33 5)."""
        self.running.remove(victim)
        scheduled.pop(victim.request_id, None)
        num_blocks = cdiv(victim.num_computed_tokens, self.config.block_size)
        choice = self.policies.swap_or_recompute(victim, num_blocks, self.manager.swap_space.num_free_blocks)
        if choice == "swap" and self.manager.swap_out(victim):
            victim.status = RequestStatus.SWAPPED
            self.stats.num_preemptions_swap += 1
        else:
            self._drop(victim)
            self.stats.num_preemptions_recompute += 1
        victim.num_preemptions += 1
        self.waiting.add(victim)
        output.preempted.append(victim.request_id)
        if self.recorder is not None:
            self.recorder.emit("preempt", victim.request_id, (victim.status.value,))

    def _drop(self, request: Request) -> None:
        """Forget the K/V of `request`; all its tokens, outputs too, will be computed again (L33 5.3)."""
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
