"""The book of requests: the one way into the scheduler and the one way out.

    add_request -> waiting <-> running -> finish_requests, finish_sequences -> gone, its blocks given back

A request with n > 1 is a family: the parent, which becomes child 0, and the children forked from it. It is
known by its parent's id until the last of them has ended.
"""

from collections.abc import Iterable

from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.sampling_params import uniform
from kvlab.schedule.beam import BeamGroup
from kvlab.schedule.group import check_group, companions
from kvlab.schedule.output import SchedulerStats
from kvlab.schedule.queue import RequestQueue
from kvlab.schedule.request import Request, RequestStatus


class RequestBook:
    """All unfinished sequences, and where each of them is."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, recorder: Recorder | None):
        self.config = config
        self.manager = manager
        self.recorder = recorder
        self.stats = SchedulerStats()
        self.requests: dict[str, Request] = {}  # every unfinished sequence by id, children included
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self._families: dict[str, list[Request]] = {}  # parent id -> its unfinished sequences
        self.groups: dict[str, BeamGroup] = {}  # by parent id
        self._num_arrived = 0
        self._finished_ids: list[str] = []

    def add_request(self, request: Request) -> None:
        """Queue `request`. ValueError, and nothing changed, if it is malformed or could never be served."""
        name = f"request {request.request_id!r}"
        if request.request_id in self.requests or request.request_id in self._families:
            raise ValueError(f"{name}: this id is in use; give each unfinished request an id of its own")
        if "#" in request.request_id:
            raise ValueError(f"{name}: '#' is kept for the ids of children (n > 1); use another character")
        request.check()
        request.max_num_tokens = self._longest(request, name)
        if request.group is not None:
            check_group(request, self.config, self.manager)
            self.groups[request.request_id] = request.group
        if request.seed is None:  # a request without a seed draws from a stream of its own, the same in every run
            request.seed = int(uniform(self.config.seed, self._num_arrived) * 2**53)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self._families[request.parent_id] = [request]
        self.waiting.add(request)
        if self.recorder is not None:
            self.recorder.emit("add", request.request_id, (request.num_prompt_tokens,))

    def _add_children(self, request: Request) -> list[Request]:
        """The prompt of `request` has been computed: its siblings appear. They have no place yet."""
        children = [request.make_child(i) for i in range(1, request.num_to_fork + 1)]
        request.num_to_fork = 0
        self.requests.update((child.request_id, child) for child in children)
        self._families[request.parent_id] += children
        return children

    def _longest(self, request: Request, name: str) -> int:
        """How many tokens, prompt and outputs, `request` may grow to. ValueError if that can never fit."""
        prompt, max_tokens = request.num_prompt_tokens, request.sampling_params.max_tokens
        in_pool = self.manager.max_tokens_per_request + 1  # the last output is never computed, so needs no slot
        in_model = self.config.max_model_len or max(in_pool, prompt + (max_tokens or 1))
        if prompt >= in_model:
            raise ValueError(
                f"{name}: the prompt has {prompt} tokens and max_model_len is {in_model}, which must also hold an "
                f"output; shorten the prompt to {in_model - 1} or raise max_model_len"
            )
        longest = min(in_model, in_pool) if max_tokens is None else min(in_model, prompt + max_tokens)
        if max(longest, prompt + 1) > in_pool:
            room = f"lower max_tokens to {in_pool - prompt}" if prompt < in_pool else "shorten the prompt"
            raise ValueError(
                f"{name}: {prompt} prompt tokens and {max(1, longest - prompt)} outputs need more than the "
                f"{self.manager.block_pool.num_usable_blocks} KV blocks of {self.config.block_size} tokens that there "
                f"are; {room}, or give the engine more blocks"
            )
        budget = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and longest - 1 > budget:
            raise ValueError(
                f"{name}: it may grow to {longest - 1} computed tokens, which without chunked prefill must fit the "
                f"{budget} of one step (it may be preempted and recomputed); enable chunked prefill or raise "
                f"max_num_batched_tokens"
            )
        return longest

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request, or any child of it, has not ended."""
        return request_id in self._families

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED,
                        error: str | None = None) -> list[Request]:  # fmt: skip
        """End requests early, in whatever state they are. An id of a request with n > 1 ends all its children.

        Unknown and finished ids are ignored. Returns the sequences that ended.
        """
        ended = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            family = self._families.get(request_id)
            if family is None and request_id in self.requests:
                family = [self.requests[request_id]]
            ended += self.finish_sequences(family or (), status, error)
        return ended

    def fail_requests(self, requests: Iterable[Request], error: str) -> list[Request]:
        """End exactly these sequences with an error; their siblings go on. Returns those that were unfinished."""
        return self.finish_sequences(requests, RequestStatus.FINISHED_ERROR, error)

    def finish_sequences(self, requests: Iterable[Request], status: RequestStatus,
                         error: str | None = None) -> list[Request]:  # fmt: skip
        """End exactly these sequences; their siblings go on. Returns those that were unfinished.

        A beam group ends as a whole, and its leader stands for it.
        """
        ended: list[Request] = []
        for request in [member for each in requests for member in companions(each)]:
            if request.is_finished():
                continue
            request.error = error
            self._finish(request, status)
            if request.group is None or request is request.group.leader:
                ended.append(request)
        self.running = [request for request in self.running if not request.is_finished()]
        return ended

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """The one way out. The caller takes it from `running`."""
        request.status = status
        if request in self.waiting:
            self.waiting.remove(request)
        self.manager.free(request)
        del self.requests[request.request_id]
        family = self._families[request.parent_id]
        family.remove(request)
        if not family:
            del self._families[request.parent_id]
            self.groups.pop(request.parent_id, None)
        self._finished_ids.append(request.request_id)
        self.stats.num_finished += 1
        if self.recorder is not None:
            self.recorder.emit("finish", request.request_id, (status.value, request.num_output_tokens))
