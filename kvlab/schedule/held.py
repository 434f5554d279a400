"""Held sequences (保留的分支): tokens whose K/V stays between generations, to be forked and gone back from (L33 2.4).

    hold --> idle --add_request--> lent to a Request: it waits, runs, is preempted --finish--> idle ... --> let_go
              | fork: the child shares the blocks of the first tokens; nothing is copied
              +---- reclaim: no block is free, so the least recently used gives all of its own back

A held sequence always keeps its tokens; its K/V is a loan. While its request waits or it is idle, its blocks count
as free for everybody else, and they are taken before any running request is preempted. What was taken is computed
again (as far as the prefix cache has lost it) when the sequence next runs.
"""

from collections import Counter
from collections.abc import Sequence

from kvlab.blocks import KVCacheBlock
from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.sampling_params import SamplingParams
from kvlab.schedule.book import RequestBook
from kvlab.schedule.request import Request, RequestStatus


class HeldSequence:
    """Tokens, and how many of them have K/V. The manager knows it by `request_id`, as it knows a request."""

    def __init__(self, request_id: str, token_ids: Sequence[int], cache_salt: str | None = None):
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.num_computed_tokens = 0
        self.request: Request | None = None  # who generates for it now, and has its blocks meanwhile
        self.last_used = 0
        self._token_ids = list(token_ids)

    @property
    def current(self) -> "HeldSequence | Request":
        """Who has its tokens and blocks at this time."""
        return self.request or self

    @property
    def all_token_ids(self) -> list[int]:
        return self._token_ids if self.request is None else self.request.all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class HeldBook(RequestBook):
    """A RequestBook that also keeps held sequences. What users do with them is ValueError in the midst of a step."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, recorder: Recorder | None):
        super().__init__(config, manager, recorder)
        self.held: dict[str, HeldSequence] = {}
        self.in_step = False  # EngineCore says so
        self._num_uses = 0

    # ---- what users do

    def hold(self, request_id: str, token_ids: Sequence[int], cache_salt: str | None = None) -> HeldSequence:
        """Keep `token_ids` as a sequence. Nothing is computed yet. ValueError if one more token would not fit."""
        self._between_steps()
        self._check_id(request_id)
        self._check_tokens(request_id, token_ids, cache_salt)
        held = HeldSequence(request_id, token_ids, cache_salt)
        self.held[request_id] = held
        self._use(held)
        return held

    def fork(self, parent: HeldSequence, request_id: str, num_tokens: int | None = None) -> HeldSequence:
        """A new sequence of the first `num_tokens` tokens of `parent` (None: all), which shares their blocks.

        The parent may be generating: the child begins with what it has by now. ValueError beyond the end.
        """
        self._known(parent)
        end = parent.num_tokens
        num_tokens = end if num_tokens is None else num_tokens
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or not 1 <= num_tokens <= end:
            raise ValueError(f"num_tokens is {num_tokens!r}: branch {parent.request_id!r} has {end}; use 1 to {end}")
        self._check_id(request_id)
        child = HeldSequence(request_id, parent.all_token_ids[:num_tokens], parent.cache_salt)
        self.held[request_id] = child
        # One that is preempted has no blocks to share now: its child finds in the cache what is still there.
        if parent.current.request_id in self.manager.req_to_blocks:
            self.manager.fork(parent.current, child, num_tokens)
        self._use(parent)
        self._use(child)
        return child

    def append(self, held: HeldSequence, token_ids: Sequence[int]) -> None:
        """Add tokens that nobody generated. Their K/V is computed when the sequence next runs."""
        self._idle(held)
        self._check_tokens(held.request_id, [*held.all_token_ids, *token_ids], held.cache_salt)
        held.all_token_ids.extend(token_ids)
        self._use(held)

    def truncate(self, held: HeldSequence, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens, 1 or more, and their K/V."""
        self._idle(held)
        del held.all_token_ids[num_tokens:]
        if held.num_computed_tokens > num_tokens:
            self.manager.hand_over(held, held, num_tokens)

    def let_go(self, held: HeldSequence) -> list[Request]:
        """Forget the sequence and give its blocks back, in whatever state it is; harmless if it is forgotten already.

        Returns the request that was generating for it and now ends with "abort", if there was one.
        """
        if self.held.get(held.request_id) is not held:
            return []
        self._between_steps()
        ended = self.finish_sequences([held.request], RequestStatus.FINISHED_ABORTED) if held.request else []
        self.manager.free(held)
        held.num_computed_tokens = 0
        del self.held[held.request_id]
        return ended

    def add_request(self, request: Request) -> None:
        """As in RequestBook; a request with `held` set goes on with that sequence and has its blocks until it ends."""
        held = request.held
        if request.request_id in self.held:
            raise ValueError(f"request {request.request_id!r}: this id is in use by a branch; give it an id of its own")
        if held is None:
            return super().add_request(request)
        self._idle(held)
        name, params = f"branch {held.request_id!r}", request.sampling_params
        if params.num_sequences > 1 or request.group is not None:
            raise ValueError(f"{name}: fork it once for each continuation; n, best_of and beams are for prompts")
        if params.prompt_logprobs is not None:
            raise ValueError(f"{name}: for prompt_logprobs all is computed again; use generate(branch.token_ids)")
        if request.all_token_ids != held.all_token_ids or request.cache_salt != held.cache_salt:
            raise ValueError(f"{name}: the request must have the tokens and the cache_salt of its branch")
        super().add_request(request)
        held.request = request
        self._use(held)
        if held.request_id in self.manager.req_to_blocks:
            # The last token is computed again if it has K/V: its logits are what the next one is sampled from.
            self.manager.hand_over(held, request, min(held.num_computed_tokens, request.num_tokens - 1))
            held.num_computed_tokens = 0

    # ---- what the scheduler does

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """The sequence takes its tokens back, and their K/V if it is beyond doubt."""
        held = request.held
        if held is not None:
            sound = status is not RequestStatus.FINISHED_ERROR
            if status is RequestStatus.FINISHED_ABORTED:
                sound = not self.in_step  # else copies that it was promised may not have been made
            held.request, held._token_ids = None, request.all_token_ids[:]
            if sound and request.request_id in self.manager.req_to_blocks:
                self.manager.hand_over(request, held, request.num_computed_tokens)
            self._use(held)
        super()._finish(request, status)

    def _reclaimable(self, but: Request) -> list["HeldSequence | Request"]:
        """Who holds blocks without running, `but` left out; the least recently used first."""
        if not self.held:
            return []
        tables, running = self.manager.req_to_blocks, RequestStatus.RUNNING
        held = [h for h in self.held.values() if h.request is None or h.request.status is not running]
        held = [h for h in held if h.current is not but and h.current.request_id in tables]
        return [h.current for h in sorted(held, key=lambda h: h.last_used)]

    def _num_available(self, request: Request, hits: Sequence[KVCacheBlock] = (), lower: Sequence[Request] = ()) -> int:
        """Blocks that are free for `request`, or would be without idle sequences and without `lower`.

        Those that it shares already, or has found, are not free for it a second time.
        """
        num_free = self.manager.block_pool.get_num_free_blocks()
        idle = self._reclaimable(request)
        if not idle:
            return num_free + (self.manager.num_blocks_freed_by(lower) if lower else 0)
        tables = self.manager.req_to_blocks
        count = Counter(block for each in [*idle, *lower] for block in tables.get(each.request_id, ()))
        own = set(hits)
        return num_free + sum(block.ref_cnt == n and block not in own for block, n in count.items())

    def _reclaim(self, needy: Request) -> bool:
        """Take all blocks from the least recently used idle sequence that has one to give; False if nobody has.

        One to give: a block that only idle sequences hold, or that `needy` would have to copy before it writes.
        """
        idle = self._reclaimable(needy)
        if not idle:
            return False
        tables, tail = self.manager.req_to_blocks, self.manager.next_block(needy)
        count = Counter(block for each in idle for block in tables[each.request_id])
        for each in idle:
            if any(block.ref_cnt == count[block] + (block is tail) for block in tables[each.request_id]):
                self._take_blocks(each)
                return True
        return False

    def _take_blocks(self, sequence: "HeldSequence | Request") -> None:
        self.manager.free(sequence)
        sequence.num_computed_tokens = 0
        self.stats.num_reclaimed_branches += 1

    def _allocate(self, request: Request, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> bool:
        """KVCacheManager.allocate_slots, with what idle sequences have to give. True if it was done."""
        while self.manager.allocate_slots(request, num_tokens, hits) is None:
            if not self._reclaim(request):
                return False
        return True

    def _own_or_hits(self, request: Request, hits: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """What a request that may bring K/V of its own starts from: of both, the longer. Returns the hits to use."""
        if request.held is None or request.request_id not in self.manager.req_to_blocks:
            return hits
        if len(hits) * self.config.block_size <= request.num_computed_tokens:
            return []
        self.manager.free(request)  # the cache has more: somebody else has computed the same tokens meanwhile
        request.num_computed_tokens = 0
        return hits

    # ---- checks

    def _between_steps(self) -> None:
        if self.in_step:
            raise ValueError("a step is being made: hold, fork, append and free between steps only")

    def _known(self, held: HeldSequence) -> None:
        self._between_steps()
        if self.held.get(held.request_id) is not held:
            raise ValueError(f"branch {held.request_id!r} has been freed: fork from one that is held")

    def _idle(self, held: HeldSequence) -> None:
        self._known(held)
        if held.request is not None:
            raise ValueError(f"branch {held.request_id!r} is generating: wait for its end, or fork it now")

    def _check_id(self, request_id: str) -> None:
        if request_id in self.held or self.is_unfinished(request_id) or "#" in request_id:
            raise ValueError(f"branch {request_id!r}: this id is in use, or holds a '#'; give it an id of its own")

    def _check_tokens(self, name: str, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """ValueError unless a request of these tokens would be served."""
        probe = Request(name, token_ids, SamplingParams(max_tokens=1), cache_salt=cache_salt)
        probe.check()
        self._longest(probe, f"branch {name!r}")

    def _use(self, held: HeldSequence) -> None:
        self._num_uses += 1
        held.last_used = self._num_uses
