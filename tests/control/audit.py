"""The fuzz's own bookkeeping: what must hold in each step and between any two, counted from tables, links and slots.

Nothing here trusts KVCacheManager.check(): owners are counted, links walked and names hashed by hand.
"""

import struct
from collections import Counter
from hashlib import sha256

from kvlab.schedule import Request, RequestStatus, SchedulerOutput
from kvlab.sim import SlotEchoRunner
from kvlab.sim.slot_echo import EMPTY


class Audit:
    """What must hold between any two steps, counted from tables, links and slots."""

    def __init__(self, fuzz, runner: SlotEchoRunner):
        self.fuzz, self.runner = fuzz, runner
        self.names: dict[bytes, tuple[int, list[int]]] = {}  # key by hand -> (logical block, its tokens)
        self._chains: dict[Request, tuple[int, bytes]] = {}
        self.running_before: frozenset[Request] = frozenset()
        self.last_scheduled: list[Request] = []

    def before_step(self, output: SchedulerOutput) -> None:
        """Is the step legal, and may every slot that it writes be written?"""
        scheduler, manager, config = self.fuzz.scheduler, self.fuzz.manager, self.fuzz.config
        self.last_scheduled = [request for request, _ in output.scheduled]
        ids = [request.request_id for request, _ in output.scheduled]
        assert len(set(ids)) == len(ids) and not set(ids) & set(output.preempted)
        assert output.total_num_scheduled_tokens <= config.max_num_batched_tokens
        threshold = config.long_prefill_token_threshold if config.enable_chunked_prefill else 0
        limit = threshold or config.max_num_batched_tokens
        size = config.block_size
        self._groups_are_whole(output)
        written = set()
        for (request, num_tokens), table in zip(output.scheduled, output.block_tables, strict=True):
            assert request.status is RequestStatus.RUNNING and request in scheduler.running
            assert table is manager.req_to_blocks[request.request_id]
            start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            assert 1 <= num_tokens <= limit and stop <= request.num_tokens
            assert config.enable_chunked_prefill or stop == request.num_tokens
            for i in range(start // size, (stop - 1) // size + 1):
                block = table[i]
                assert block.ref_cnt == 1 and block.block_hash is None, f"{request} would write into {block}"
                assert block.block_id not in written and not block.is_null
                assert not any(manager.swap_space.resident(c) is block for c in self._owned_cpu_blocks())
                written.add(block.block_id)
        admitted = {request for request, _ in output.scheduled} - self.running_before
        for victim in (scheduler.requests[name] for name in output.preempted if admitted):
            # Then it made way for somebody of strictly higher priority, and nobody behind it came in.
            assert min(r.priority for r in admitted) < victim.priority, "admitted amid preemption"
            assert all(r.sort_key < victim.sort_key for r in admitted), "admitted amid preemption"
        assert len(scheduler.running) <= config.max_num_seqs
        assert not (self.fuzz.contiguous and output.block_ops)
        self.running_before = frozenset(scheduler.running)  # the step may fail and be scheduled again

    def _groups_are_whole(self, output: SchedulerOutput) -> None:
        """Members run together, wait together, and are sampled in the same step."""
        sampled = {r for r, n in output.scheduled if r.num_computed_tokens + n == r.num_tokens}
        for group in self.fuzz.scheduler.groups.values():
            for member in group.members:  # after the step it may be another's fork: what it publishes is noted now
                self._chains.pop(member, None)
                self._name(member, member.num_computed_tokens + dict(output.scheduled).get(member, 0))
            if group.leader.num_to_fork:
                assert group.members == [group.leader]
                continue
            assert len(group.members) == len({m.request_id for m in group.members}) == group.width
            assert len(sampled.intersection(group.members)) in (0, group.width), "a part of a group is sampled"
            assert len({m.status is RequestStatus.RUNNING for m in group.members}) == 1, "a part of a group runs"
            assert len({m.num_tokens for m in group.members}) == 1
            assert len({tuple(m.output_token_ids) for m in group.members}) == group.width, "two beams are one"

    def _owned_cpu_blocks(self) -> set[int]:
        return {cpu for table in self.fuzz.manager.swap_space.tables.values() for cpu in table}

    def after_step(self) -> None:
        fuzz = self.fuzz
        self.running_before = frozenset(fuzz.scheduler.running)
        fuzz.manager.check()
        self._requests()
        self._ownership()
        self._contents()
        self._swap_space()

    def _requests(self) -> None:
        scheduler, manager = self.fuzz.scheduler, self.fuzz.manager
        waiting, running = list(scheduler.waiting), scheduler.running
        assert len(waiting) == len(scheduler.waiting)
        assert len({*waiting, *running}) == len(waiting) + len(running)
        assert {r.request_id: r for r in [*waiting, *running]} == scheduler.requests
        assert waiting == sorted(waiting, key=lambda r: (r.priority, r.arrival, r.child_index))
        if waiting:
            assert scheduler.waiting.peek() is waiting[0]
        assert len(running) <= self.fuzz.config.max_num_seqs
        for request in running:
            assert request.status is RequestStatus.RUNNING
            assert len(manager.req_to_blocks[request.request_id]) * manager.block_size >= request.num_computed_tokens
        lent = [r for r in waiting if r.held is not None and r.status is RequestStatus.WAITING]
        self._held(lent)
        for request in waiting:
            if request in lent:
                continue
            swapped = request.status is RequestStatus.SWAPPED
            assert swapped or request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.request_id not in manager.req_to_blocks
            assert swapped == (request.request_id in manager.swap_space.tables)
            assert swapped or request.num_computed_tokens == 0
        held = {r.request_id for r in [*lent, *scheduler.held.values()]}
        assert set(manager.req_to_blocks) - held == {r.request_id for r in running}
        for request in [*waiting, *running]:
            assert request.num_computed_tokens < request.num_tokens < request.max_num_tokens

    def _held(self, lent: list[Request]) -> None:
        """Who generates for a branch has its blocks; else the branch has them; no more blocks than computed tokens."""
        scheduler, tables, size = self.fuzz.scheduler, self.fuzz.manager.req_to_blocks, self.fuzz.config.block_size
        for held in scheduler.held.values():
            if held.request is not None:
                assert held.request_id not in tables and held.request.held is held
                assert scheduler.requests[held.request.request_id] is held.request
            assert 0 <= held.num_computed_tokens <= held.num_tokens
        generating = {held for held in scheduler.held.values() if held.request is not None}
        assert {r.held for r in scheduler.requests.values() if r.held is not None} == generating
        for each in [*lent, *(held for held in scheduler.held.values() if held.request is None)]:
            assert len(tables.get(each.request_id, ())) == -(-each.num_computed_tokens // size)

    def _ownership(self) -> None:
        pool = self.fuzz.manager.block_pool
        owners = Counter(block.block_id for table in self.fuzz.manager.req_to_blocks.values() for block in table)
        queued, block = [], pool.free_block_queue.head.next_free_block
        while block.block_id >= 0:  # forwards by hand, each link checked backwards
            assert block.prev_free_block.next_free_block is block
            queued.append(block.block_id)
            block = block.next_free_block
        assert len(queued) == pool.get_num_free_blocks() == len(set(queued))
        assert not owners.keys() & set(queued), "owned and free"
        assert owners.keys() | set(queued) == set(range(1, pool.num_gpu_blocks)), "a block is lost"
        assert all(block.ref_cnt == owners[block.block_id] for block in pool.blocks)
        assert self.runner.gpu[0] == [EMPTY] * len(self.runner.gpu[0]), "the null block was written"

    def _contents(self) -> None:
        """Computed tokens of everybody, and published blocks, are really in the slots."""
        manager, size, gpu = self.fuzz.manager, self.fuzz.config.block_size, self.runner.gpu
        idle = [held for held in self.fuzz.scheduler.held.values() if held.request is None]
        for request in [*self.fuzz.scheduler.requests.values(), *idle]:
            table = manager.req_to_blocks.get(request.request_id)
            blocks = [gpu[block.block_id] for block in table] if table is not None else []
            if request not in idle and request.status is RequestStatus.SWAPPED:
                blocks = [self.runner.cpu[cpu] for cpu in manager.swap_space.tables[request.request_id]]
            held = [slot for slots in blocks for slot in slots][: request.num_computed_tokens]
            tokens = request.all_token_ids[: request.num_computed_tokens]
            assert held == list(zip(tokens, range(len(tokens)), strict=True)), f"{request} has lost its K/V"
        for request in {*self.fuzz.scheduler.requests.values(), *self.last_scheduled}:  # those that ended, too
            if request.group is None:
                self._name(request)
        published = manager.block_pool.cached_block_hash_to_block
        assert not published or self.fuzz.config.enable_prefix_caching
        for key, block in published.items():
            assert key in self.names, f"{block} has a name that no computed tokens lead to"
            index, tokens = self.names[key]
            want = list(zip(tokens, range(index * size, (index + 1) * size), strict=True))
            assert block.block_hash == key
            assert gpu[block.block_id] == want, f"{block} does not hold what it is named for"
        assert sum(block.block_hash is not None for block in manager.block_pool.blocks) == len(published)

    def _name(self, request: Request, num_computed_tokens: int | None = None) -> None:
        """Hash the request's new full blocks, by hand."""
        if num_computed_tokens is None:
            num_computed_tokens = request.num_computed_tokens
        size, salt = self.fuzz.config.block_size, request.cache_salt
        root = sha256(b"kvlab" if salt is None else b"kvlab salt " + salt.encode()).digest()
        done, parent = self._chains.get(request, (0, root))
        while (done + 1) * size <= num_computed_tokens:
            tokens = request.all_token_ids[done * size : (done + 1) * size]
            parent = sha256(parent + struct.pack(f"={size}q", *tokens)).digest()
            self.names[parent] = (done, tokens)
            done += 1
        self._chains[request] = (done, parent)

    def _swap_space(self) -> None:
        space = self.fuzz.manager.swap_space
        owned = self._owned_cpu_blocks()
        assert space.num_free_blocks + len(owned) == space.num_blocks, "CPU blocks leak"
        assert not owned & set(space._free)
        for cpu in owned:
            block = space.resident(cpu)
            if block is not None:
                assert block.ref_cnt > 0
                assert self.runner.gpu[block.block_id] == self.runner.cpu[cpu], f"{block} is not CPU block {cpu}"
