"""State machines: any order of operations on the free queue, the block pool and the manager, against plain models."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_fuzz import break_it

from kvlab.blocks import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex
from kvlab.swap import SwapSpace

QUICK = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
INDEX = st.integers(0, 10**6)  # picks one of what is there, whatever its number


# ---- the free queue: a list


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(8)]
        self.queue = FreeKVCacheBlockQueue(self.blocks[:5])
        self.model = list(range(5))

    @rule()
    def popleft(self):
        if not self.model:
            with pytest.raises(OutOfBlocks):
                self.queue.popleft()
        else:
            assert self.queue.popleft().block_id == self.model.pop(0)

    @rule(n=st.integers(0, 9))
    def popleft_n(self, n):
        if n > len(self.model):
            with pytest.raises(OutOfBlocks, match=f"{n} blocks asked for, {len(self.model)} are free"):
                self.queue.popleft_n(n)
        else:
            assert [b.block_id for b in self.queue.popleft_n(n)] == self.model[:n]
            del self.model[:n]

    @rule(i=st.integers(0, 7))
    def append_or_remove(self, i):
        if i in self.model:
            with pytest.raises(ValueError, match=f"block {i} is already in"):
                self.queue.append(self.blocks[i])
            self.queue.remove(self.blocks[i])
            self.model.remove(i)
        else:
            with pytest.raises(ValueError, match=f"block {i} is not in"):
                self.queue.remove(self.blocks[i])
            self.queue.append(self.blocks[i])
            self.model.append(i)

    @rule(order=st.permutations(range(8)))
    def append_n(self, order):
        out = [i for i in order if i not in self.model]
        self.queue.append_n([self.blocks[i] for i in out])
        self.model += out

    @invariant()
    def same_order(self):
        assert [b.block_id for b in self.queue.get_all_free_blocks()] == self.model
        assert self.queue.num_free_blocks == len(self.model)


# ---- the pool: dictionaries


class Sequence_:
    """What the pool needs to know of a request."""

    def __init__(self, number: int, tokens: list[int], salt: str | None):
        self.request_id, self.cache_salt, self.all_token_ids = f"r{number}", salt, tokens
        self.num_computed_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # so few that prefixes meet all the time
SALTS = st.sampled_from([None, None, None, "a"])


class PoolMachine(RuleBasedStateMachine):
    SIZE, NUM = 2, 7

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM, prefix_index=HashChainIndex(self.SIZE))
        self.free = list(range(1, self.NUM))  # in eviction order
        self.refs = Counter()
        self.names: dict[tuple, int] = {}  # (salt, all tokens up to the block's end) -> block
        self.held: list[tuple[Sequence_, list[KVCacheBlock], object]] = []
        self.number = 0

    def _take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        for i in taken:
            self.refs[i] = 1
        self.names = {name: i for name, i in self.names.items() if i not in taken}
        return taken

    @rule(tokens=TOKENS, salt=SALTS)
    def start(self, tokens, salt):
        hits = self.pool.prefix_index.match(tokens, salt)
        model = []
        for stop in range(self.SIZE, len(tokens) + 1, self.SIZE):
            if (salt, tuple(tokens[:stop])) not in self.names:
                break
            model.append(self.names[salt, tuple(tokens[:stop])])
        assert [b.block_id for b in hits] == model
        needed = -(-len(tokens) // self.SIZE) - len(hits)
        self.pool.touch(hits)
        for i in model:
            self.refs[i] += 1
        self.free = [i for i in self.free if i not in model]
        if needed > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.get_new_blocks(needed)
            self.pool.free_blocks(reversed(hits))
            self._drop(reversed(model))
            return
        new = self.pool.get_new_blocks(needed)
        assert [b.block_id for b in new] == self._take(needed)
        self.number += 1
        self.held.append((Sequence_(self.number, tokens, salt), hits + new, None))

    @precondition(lambda self: self.held)
    @rule(i=INDEX, full=st.integers(0, 4), keep_cursor=st.booleans())
    def publish(self, i, full, keep_cursor):
        i %= len(self.held)
        sequence, blocks, cursor = self.held[i]
        full = min(full, len(sequence.all_token_ids) // self.SIZE)
        cursor = self.pool.cache_full_blocks(sequence, blocks, full, cursor)
        self.held[i] = (sequence, blocks, cursor if keep_cursor else None)
        named = set(self.names.values())
        for k in range(full):
            name = (sequence.cache_salt, tuple(sequence.all_token_ids[: (k + 1) * self.SIZE]))
            if name not in self.names and blocks[k].block_id not in named:
                self.names[name] = blocks[k].block_id

    def _drop(self, ids) -> None:
        for i in ids:
            self.refs[i] -= 1
            if self.refs[i] == 0:
                self.free.append(i)

    @precondition(lambda self: self.held)
    @rule(i=INDEX)
    def finish(self, i):
        _, blocks, _ = self.held.pop(i % len(self.held))
        self.pool.free_blocks(reversed(blocks))
        self._drop(b.block_id for b in reversed(blocks))

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.names = {}

    @precondition(lambda self: self.free)
    @rule(i=INDEX)
    def double_free(self, i):
        victim = self.pool.blocks[self.free[i % len(self.free)]]
        owned = [block for _, blocks, _ in self.held for block in blocks][:1]
        with pytest.raises(ValueError, match=f"block {victim.block_id} has no owner: it was freed twice"):
            self.pool.free_blocks([*owned, victim])

    @invariant()
    def equal(self):
        assert [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()] == self.free
        assert [b.ref_cnt for b in self.pool.blocks] == [self.refs[i] for i in range(self.NUM)]
        assert len(self.pool.cached_block_hash_to_block) == len(self.names)
        named = {b.block_id for b in self.pool.blocks if b.block_hash is not None}
        assert named == set(self.names.values()), "not the same blocks have names"
        for name, i in self.names.items():
            assert self.pool.prefix_index.match(name[1], name[0])[-1:] in ([], [self.pool.blocks[i]])
        assert self.pool.get_usage() == 1 - len(self.free) / (self.NUM - 1)


# ---- the manager: token lists, and a memory that replays the block operations


class ManagerMachine(RuleBasedStateMachine):
    """Requests are planned, preempted, resumed and aborted in any order; then one forward writes what was planned."""

    SIZE, NUM, NUM_CPU, CACHING = 2, 9, 5, True

    def __init__(self):
        super().__init__()
        self.manager = KVCacheManager(self.NUM, self.SIZE, self.CACHING, self.NUM_CPU)
        self.gpu = [[None] * self.SIZE for _ in range(self.NUM)]
        self.cpu = [[None] * self.SIZE for _ in range(self.NUM_CPU)]
        self.running: list[Sequence_] = []
        self.away: list[Sequence_] = []  # waiting, dropped or swapped out
        self.plan: dict[Sequence_, int] = {}
        self.aborted: list[tuple[Sequence_, int, list]] = []  # planned, and gone before the forward
        self.number = 0

    def _snapshot(self):
        pool, space = self.manager.block_pool, self.manager.swap_space
        tables = {name: table.block_ids for name, table in self.manager.req_to_blocks.items()}
        queue = [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]
        links = [space.resident(cpu) for cpu in range(self.NUM_CPU)]
        swapped = {name: list(table) for name, table in space.tables.items()}
        refs = [(b.ref_cnt, b.block_hash) for b in pool.blocks]
        return tables, queue, refs, swapped, links, space.num_free_blocks, list(self.manager._block_ops)

    def _allocate(self, request: Sequence_, want: int, hits=()) -> bool:
        """Allocate for `want` tokens; if it is refused nothing may have changed, and it must have been short."""
        before = self._snapshot()
        free = self.manager.block_pool.get_num_free_blocks()
        if self.manager.allocate_slots(request, want, hits) is None:
            assert self._snapshot() == before
            # All blocks of the request, and a copy of one: never refused with that many free.
            assert free < -(-request.num_tokens // self.SIZE) + 1
            return False
        self.plan[request] = want
        return True

    @initialize(tokens=st.lists(TOKENS, min_size=1, max_size=2), token=st.integers(0, 1))
    def begin(self, tokens, token):
        """Somebody is computed and forked already: that is where it becomes interesting."""
        for text in tokens:
            self.arrive(text, None, 9)
        self.forward(False, True, token)
        self.fork(0, token)

    @precondition(lambda self: not self.aborted)
    @rule(tokens=TOKENS, salt=SALTS, want=st.integers(0, 9))
    def arrive(self, tokens, salt, want):
        self.number += 1
        self.away.append(Sequence_(self.number, list(tokens), salt))
        if want:
            self.enter(len(self.away) - 1, want)

    @precondition(lambda self: self.running and not self.aborted)
    @rule(token=st.integers(0, 1))
    def decode(self, token):
        """An ordinary step: one token for everybody."""
        for i in range(len(self.running)):
            self.grow(i, 1)
        self.forward(False, True, token)

    @precondition(lambda self: self.away and not self.aborted)
    @rule(i=INDEX, want=st.integers(1, 5))
    def enter(self, i, want):
        request = self.away[i % len(self.away)]
        hits, num_hit = self.manager.get_computed_blocks(request)
        computed = max(request.num_computed_tokens, num_hit)
        want = min(want, request.num_tokens - computed)
        if self._allocate(request, want, hits):
            request.num_computed_tokens = computed
            self.away.remove(request)
            self.running.append(request)

    @precondition(lambda self: self.running and not self.aborted)
    @rule(i=INDEX, want=st.integers(1, 5))
    def grow(self, i, want):
        """Plan tokens for running request i, or for the next that has none planned."""
        order = self.running[i % len(self.running) :] + self.running
        for request in [r for r in order if r not in self.plan and r.num_tokens <= 14][:1]:
            self._allocate(request, min(want, request.num_tokens - request.num_computed_tokens))

    @precondition(lambda self: self.running and not self.aborted)
    @rule(i=INDEX, swap=st.booleans())
    def preempt(self, i, swap):
        request = self.running[i % len(self.running)]
        before, free = self._snapshot(), self.manager.swap_space.num_free_blocks
        if swap and self.manager.swap_out(request):
            assert request.request_id not in self.manager.req_to_blocks
        elif swap:
            assert self._snapshot() == before
            assert request.num_computed_tokens == 0 or free < -(-request.num_computed_tokens // self.SIZE)
            return
        else:
            self.manager.free(request)
            request.num_computed_tokens = 0
        self.plan.pop(request, None)
        self.running.remove(request)
        self.away.append(request)

    @precondition(lambda self: self.running)
    @rule(i=INDEX)
    def abort(self, i):
        """The runner may still write for it, so nobody gets its blocks before the forward."""
        request = self.running.pop(i % len(self.running))
        if request in self.plan:
            self.aborted.append((request, self.plan.pop(request), list(self.manager.req_to_blocks[request.request_id])))
        self.manager.free(request)

    @precondition(lambda self: self.away)
    @rule(i=INDEX)
    def abort_away(self, i):
        self.manager.free(self.away.pop(i % len(self.away)))

    @precondition(lambda self: not self.plan and not self.aborted)
    @rule(i=INDEX, token=st.integers(0, 1))
    def fork(self, i, token):
        """At any time between steps, mid-prefill too; the child goes on with a token of its own."""
        parents = [request for request in self.running if request.num_computed_tokens]
        if parents:
            parent = parents[i % len(parents)]
            self.number += 1
            tokens = parent.all_token_ids[: parent.num_computed_tokens] + [token]
            child = Sequence_(self.number, tokens, parent.cache_salt)
            before = self._snapshot()
            assert self.manager.fork(parent, child)
            self.running.append(child)
            assert child.num_computed_tokens == parent.num_computed_tokens
            after = self._snapshot()
            shared = after[0].pop(child.request_id)
            assert len(shared) == -(-parent.num_computed_tokens // self.SIZE)
            assert shared == before[0][parent.request_id][: len(shared)]
            assert (after[0], after[1], after[3:]) == (before[0], before[1], before[3:]), "a fork moves nothing"

    @precondition(lambda self: self.plan or self.aborted or self.manager._block_ops)
    @rule(fails=st.sampled_from([False, False, False, True]), publish=st.booleans(), token=st.integers(0, 1))
    def forward(self, fails, publish, token):
        for kind, src, dst in self.manager.take_block_ops():
            source = self.cpu if kind == "swap_in" else self.gpu
            target = self.cpu if kind == "swap_out" else self.gpu
            target[dst] = list(source[src])
        planned = [(r, n, list(self.manager.req_to_blocks[r.request_id])) for r, n in self.plan.items()]
        for request, want, table in planned:
            start, stop = request.num_computed_tokens, request.num_computed_tokens + want
            written = table[start // self.SIZE : (stop - 1) // self.SIZE + 1]
            assert all(block.is_writable for block in written), "a write into a block that others read"
        for request, want, table in planned + self.aborted:
            for p in range(request.num_computed_tokens, request.num_computed_tokens + want):
                self.gpu[table[p // self.SIZE].block_id][p % self.SIZE] = (request.all_token_ids[p], p)
        if not fails:
            for request, want, _ in planned:
                request.num_computed_tokens += want
                if request.num_computed_tokens == request.num_tokens:
                    request.all_token_ids.append(token)
                if publish:
                    self.manager.cache_blocks(request, request.num_computed_tokens)
        self.plan.clear()
        self.aborted.clear()

    @precondition(lambda self: self.number % 5 == 4)
    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (self.manager.usage == 0)

    @invariant()
    def sound(self):
        self.manager.check()
        assert self.gpu[0] == [None] * self.SIZE
        if self.manager._block_ops:
            return  # contents are promised once the copies are made
        for request in [*self.running, *self.away]:
            blocks = [self.gpu[b.block_id] for b in self.manager.req_to_blocks.get(request.request_id, ())]
            blocks += [self.cpu[cpu] for cpu in self.manager.swap_space.tables.get(request.request_id, ())]
            held = [slot for block in blocks for slot in block][: request.num_computed_tokens]
            assert held == [(t, p) for p, t in enumerate(request.all_token_ids[: request.num_computed_tokens])]
        for cpu in {cpu for table in self.manager.swap_space.tables.values() for cpu in table}:
            block = self.manager.swap_space.resident(cpu)
            assert block is None or self.gpu[block.block_id] == self.cpu[cpu], "the link is not true"

    @invariant()
    def hits_hold_what_they_say(self):
        """What the index promises to anybody is in the slots, also for blocks that nobody owns."""
        if self.manager._block_ops:
            return
        for request in [*self.running, *self.away]:
            blocks, num_hit = self.manager.get_computed_blocks(request)
            slots = [slot for block in blocks for slot in self.gpu[block.block_id]]
            assert slots == [(t, p) for p, t in enumerate(request.all_token_ids[:num_hit])]
            assert num_hit < request.num_tokens

    def teardown(self):
        for request in [*self.running, *self.away]:
            self.manager.free(request)
        assert self.manager.usage == 0
        assert self.manager.swap_space.num_free_blocks == self.NUM_CPU
        assert self.manager.reset_prefix_cache()


class UncachedManagerMachine(ManagerMachine):
    CACHING = False


class TokenBlockManagerMachine(ManagerMachine):
    SIZE, NUM, NUM_CPU = 1, 16, 9


@pytest.mark.parametrize(
    "machine", [QueueMachine, PoolMachine, ManagerMachine, UncachedManagerMachine, TokenBlockManagerMachine]
)
def test_any_order_of_operations(machine):
    run_state_machine_as_test(machine, settings=QUICK)


FAULTS = {
    "forget the copy": (
        KVCacheManager, "_copy_on_write",
        'self._block_ops.append(("copy", shared.block_id, copy.block_id))', "pass"),
    "a block that is written keeps its link": (
        KVCacheManager, "allocate_slots", "self.swap_space.unlink(tail)", "pass"),
    "new blocks are taken before the hits": (
        KVCacheManager, "_start",
        "self.block_pool.touch(held)  # before taking new ones, which would evict them\n"
        "    new = self.block_pool.get_new_blocks(num_new)",
        "new = self.block_pool.get_new_blocks(num_new)\n    self.block_pool.touch(held)"),
    "swap out what fits": (SwapSpace, "swap_out", "return None", "new = new[: len(self._free)]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machines_catch_faults(monkeypatch, fault):
    break_it(monkeypatch, *FAULTS[fault])
    caught = False
    # Many examples: it ends at the first that notices. Which one that is depends on the draw.
    for machine in (ManagerMachine, TokenBlockManagerMachine, UncachedManagerMachine):
        try:
            run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=400, phases=[Phase.generate]))
        except Exception:
            caught = True
            break
    assert caught, f"nobody noticed: {fault}"
