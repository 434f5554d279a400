"""After the step: what the runner computed becomes what requests are.

    update_from_output()   advance, publish full blocks, append tokens, fork children, move beam groups on, finish
    fail_step()            the step could not be made: end those whose K/V is in doubt

Only here do num_computed_tokens advance, tokens appear and blocks become findable.
"""

from kvlab.schedule import group as whole
from kvlab.schedule.beam import BeamGroup
from kvlab.schedule.held import HeldBook
from kvlab.schedule.output import EngineCoreOutput, SchedulerOutput
from kvlab.schedule.request import Request, RequestStatus


class StepOutcome(HeldBook):
    """The book of requests and held sequences, which takes in what steps bring."""

    def update_from_output(self, output: SchedulerOutput, sampled: dict[str, list[int]]) -> list[EngineCoreOutput]:
        """Take in what the step computed: advance, publish full blocks, append tokens, fork, finish.

        sampled: token ids by request id, for those whose last known token was computed; n of them where the
        prompt of a request with n > 1 was. Requests that ended meanwhile are passed over.
        """
        results = []
        block_size, running = self.config.block_size, RequestStatus.RUNNING
        num_finished = self.stats.num_finished
        for request, num_tokens in output.scheduled:
            if request.status is not running:
                continue
            request.num_computed_tokens = computed = request.num_computed_tokens + num_tokens
            if computed % block_size < num_tokens:  # a block is full now
                self.manager.cache_blocks(request, computed)
            tokens = sampled.get(request.request_id)
            if tokens is None:
                continue
            if request.group is not None:
                request.group.report(request, sampled.logprobs[request.request_id][0])
                continue
            if request.num_to_fork:
                family = [request, *self._fork_children(request)]
                results += [self._take(sequence, [token]) for sequence, token in zip(family, tokens, strict=True)]
                continue
            if request.append_output_token(tokens[0]):  # _take, written out: this is the line of every decode
                self._finish(request, request.status)
            results.append(EngineCoreOutput(request, tokens, request.status.finish_reason))
        for group in list(self.groups.values()):
            if len(group.reports) == len(group.members):
                results += self._advance_group(group, output)
        if self.stats.num_finished > num_finished:
            self.running = [request for request in self.running if request.status is running]
        if self.recorder is not None:
            self.recorder.emit("step_end", None, (output.total_num_scheduled_tokens,))
        return results

    def _take(self, sequence: Request, tokens: list[int]) -> EngineCoreOutput:
        """The one token of `tokens` was sampled for `sequence`, which may end with it."""
        if sequence.append_output_token(tokens[0]):
            self._finish(sequence, sequence.status)
        return EngineCoreOutput(sequence, tokens, sequence.status.finish_reason)

    def fail_step(self, output: SchedulerOutput, error: str) -> list[Request]:
        """The copies of `output` could not all be made: end every request whose K/V they leave in doubt.

        Victims of this step whose way to swap space is in doubt lose their K/V and will recompute it.
        """
        for request in [self.requests[i] for i in output.preempted if i in self.requests]:
            if request.status is RequestStatus.SWAPPED:
                self._drop(request)
        filled = {dst for kind, _, dst in output.block_ops if kind != "swap_out"}
        held_back = whole.in_doubt(self.groups.values(), filled, self.manager)
        return self.fail_requests([request for request, _ in output.scheduled] + held_back, error)

    def _advance_group(self, group: BeamGroup, output: SchedulerOutput) -> list[EngineCoreOutput]:
        """All members have reported: end the search, or let the best live on, each as a fork of its parent."""
        group.memory.measure([self.manager.req_to_blocks[m.request_id] for m in group.members], output.block_ops)
        living = group.advance()
        if group.is_over:
            status = RequestStatus(group.finished[0].finish_reason)
            return [EngineCoreOutput.ended(leader) for leader in self.finish_sequences([group.leader], status)]
        for child in self._add_children(group.leader):  # after the prompt; their seats have been kept
            child.status = RequestStatus.RUNNING
            self.running.append(child)
            group.members.append(child)
        whole.branch(group, living, self.manager)
        return []

    def _fork_children(self, request: Request) -> list[Request]:
        """The prompt of a request with n > 1 has been computed: its siblings appear and share its blocks.

        A child that finds no seat waits without blocks, and computes (or finds cached) its prompt later.
        """
        children = self._add_children(request)
        for child in children:
            if len(self.running) < self.config.max_num_seqs and self.manager.fork(request, child):
                child.status = RequestStatus.RUNNING
                self.running.append(child)
            else:
                self.waiting.add(child)
        return children
