"""Parts: ours, other designs and broken ones through their smallest configurations; and what is said when one fails."""

import math
import re
from dataclasses import fields, replace

import pytest
import torch

from kvlab import sizing
from kvlab.arena import ContiguousArena
from kvlab.blocks import BlockPool, BlockPoolBase, BlockTable, FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks, sharing
from kvlab.config import EngineConfig
from kvlab.engine.core import step
from kvlab.engine.text import Detokenizer, StopChecker
from kvlab.events import Recorder
from kvlab.model import batch, layers, plain
from kvlab.parts import KINDS, SMALLEST, PartError, Parts, survive
from kvlab.prefix import HashChainIndex
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies, Request
from kvlab.schedule import policies as ours
from kvlab.standin.decode import paged_attention


def sample(logits, temperature, top_k, top_p, uniform):
    """In plain Python, one token after the other."""
    ranks = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return ranks[0]
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    if top_k:
        ranks = ranks[:top_k]
    if top_p < 1:
        total, wanted = 0.0, top_p * sum(weights[i] for i in ranks)
        for end, i in enumerate(ranks):  # noqa: B007
            total += weights[i]
            if total >= wanted:
                break
        ranks = ranks[: end + 1]
    total, target = 0.0, uniform * sum(weights[i] for i in sorted(ranks))
    for token in sorted(ranks):
        total += weights[token]
        if total > target:
            return token


class Arena(ContiguousArena):
    def __init__(self, capacity, start=1):
        super().__init__(capacity, start=start)


OURS = {
    "sizing": sizing.num_gpu_blocks, "arena": Arena, "free_queue": FreeKVCacheBlockQueue, "block_pool": BlockPool,
    "fork": sharing.fork, "ensure_writable": sharing.ensure_writable, "prefix_index": HashChainIndex,
    "admit": ours.admit, "plan_tokens": ours.plan_tokens, "choose_victim": ours.choose_victim,
    "swap_or_recompute": ours.swap_or_recompute, "may_resume": ours.may_resume, "attention": paged_attention,
    "rms_norm": layers.rms_norm, "rope": plain.rope, "attend": plain.attend, "flat_batch": batch.flat_batch,
    "sampler": sample,
    "detokenizer": Detokenizer, "stop_checker": StopChecker, "step": step,
}  # fmt: skip


def failures(parts: Parts) -> list[str]:
    return [f"{o.part}, {o.configuration}: {o.message}" for o in survive(parts) if not o.survived]


def test_every_part_has_a_kind_and_smallest_configurations():
    names = [field.name for field in fields(Parts)]
    assert names == list(KINDS) == list(SMALLEST) == list(OURS)


def test_ours_survive_alone_and_all_together():
    outcomes = survive(Parts(**OURS))
    assert [o for o in outcomes if not o.survived] == []
    assert {o.part for o in outcomes} == {*OURS, "all together"}


def test_nothing_replaced_is_ours():
    parts = Parts()
    assert parts.replaced == {} and parts.policies == Policies()
    pool = parts.make_manager(EngineConfig(num_gpu_blocks_override=4)).block_pool
    assert type(pool) is BlockPool and type(pool.free_block_queue) is FreeKVCacheBlockQueue
    assert parts.num_gpu_blocks(1000, 1.0, 0, 0, 0, 10) == 100


# ---- each configuration really uses the part, each method of it


def raising(*args, **kwargs):
    raise KeyError("boom")


USED = [(part, method) for part, kind in KINDS.items() for method in kind.methods or [""]
        if (part, method) not in {("free_queue", "popleft"), ("free_queue", "append")}]  # fmt: skip


@pytest.mark.parametrize(("part", "method"), USED)
def test_a_part_that_raises_is_named_with_its_own_error(part, method):
    if method:
        broken = type("Mine", (OURS[part],), {method: raising})
    else:
        broken = lambda *args, **kwargs: (OURS[part](*args, **kwargs), raising())  # noqa: E731
    fails = [o for o in survive(Parts(**{part: broken})) if not o.survived]
    assert fails, f"no configuration of {part} calls {method}"
    for outcome in fails:
        assert isinstance(outcome.error, PartError) and outcome.error.part == part
        assert f"your part `{part}` raised KeyError" in outcome.message and "boom" in outcome.message
        assert method in outcome.message
        assert isinstance(outcome.error.__cause__, KeyError)


# ---- other designs


class ListQueue:
    def __init__(self, blocks):
        self.blocks = list(blocks)

    @property
    def num_free_blocks(self):
        return len(self.blocks)

    def popleft(self):
        return self.blocks.pop(0)

    def popleft_n(self, n):
        return [self.popleft() for _ in range(n)]

    def remove(self, block):
        self.blocks.remove(block)

    def append(self, block):
        self.blocks.append(block)

    def append_n(self, blocks):
        self.blocks += blocks

    def get_all_free_blocks(self):
        return list(self.blocks)


class PoolThatKeepsNames(BlockPoolBase):
    """As after lab 03's first exercises: it does not evict yet."""

    def get_new_blocks(self, num_blocks):
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block.ref_cnt += 1
        return blocks

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.append(block)


class PoolThatEvicts(PoolThatKeepsNames):
    def get_new_blocks(self, num_blocks):
        blocks = super().get_new_blocks(num_blocks)
        for block in blocks:
            if block.block_hash is not None:
                self.evict(block)
        return blocks


class TupleIndex:
    """Names are whole prefixes."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.cached_block_hash_to_block = {}

    def _names(self, tokens, salt, number):
        return [(salt, *tokens[: (i + 1) * self.block_size]) for i in range(number)]

    def match(self, tokens, salt=None):
        found = []
        for name in self._names(tokens, salt, len(tokens) // self.block_size):
            if name not in self.cached_block_hash_to_block:
                break
            found.append(self.cached_block_hash_to_block[name])
        return found

    def insert(self, tokens, blocks, salt=None, cursor=None):
        for block, name in zip(blocks, self._names(tokens, salt, len(blocks)), strict=True):
            if block.block_hash is None and name not in self.cached_block_hash_to_block:
                block.block_hash = name
                self.cached_block_hash_to_block[name] = block

    def remove(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None


class BitmapArena:
    def __init__(self, capacity, start=0):
        self.owners, self.start = [None] * capacity, start

    def allocate(self, owner, size):
        for first in range(len(self.owners) - size, -1, -1):
            if self.owners[first : first + size] == [None] * size:
                self.owners[first : first + size] = [owner] * size
                return first + self.start
        return None

    def free(self, owner):
        self.owners = [None if unit == owner else unit for unit in self.owners]


def copy_first(pool, table, index):
    shared = table[index]
    table[index] = pool.get_new_blocks(1)[0]
    pool.free_blocks([shared])
    return shared, table[index]


OTHERS = {
    "sizing": lambda total, share, weights, activations, graphs, block: (
        int(total * share) - weights - activations - graphs) // block,
    "arena": BitmapArena, "free_queue": ListQueue, "block_pool": PoolThatEvicts, "prefix_index": TupleIndex,
    "fork": lambda pool, blocks: [pool.touch([block]) or block for block in blocks],
    "ensure_writable": copy_first,
    "admit": lambda running, seats, forming: forming and running < seats,
    "plan_tokens": lambda pending, budget, limit: [
        min(tokens, limit, max(0, budget - sum(pending[:i]))) for i, tokens in enumerate(pending)],
    "choose_victim": lambda running, needy, gain: needy,
    "swap_or_recompute": lambda request, blocks, free: "recompute",
    "may_resume": lambda request, room: room.needed + room.promised + request.num_preemptions <= room.free,
    "step": lambda scheduler, runner: [*step(scheduler, runner)], "sampler": sample,
}  # fmt: skip


@pytest.mark.parametrize("part", OTHERS)
def test_other_designs_survive_alone(part):
    assert failures(Parts(**{part: OTHERS[part]})) == []


def test_other_designs_survive_all_together():
    assert failures(Parts(**OTHERS)) == []


def test_a_pool_that_does_not_evict_works_with_caching_off_and_says_so_with_caching_on():
    parts = Parts(block_pool=PoolThatKeepsNames, free_queue=ListQueue)
    first, second = [o for o in survive(parts) if o.part == "block_pool"]
    assert first.survived and not first.is_optional
    assert second.is_optional
    assert "call self.evict(block) first, or run with enable_prefix_caching=False" in second.message
    assert all(o.survived for o in survive(parts) if o.part == "all together")


def test_the_write_barrier_by_item_assignment_renews_the_table():
    table = BlockTable(KVCacheBlock(i) for i in range(3))
    before = table.version
    table[1] = KVCacheBlock(7)
    assert table.version != before


# ---- broken ones


def mine(base, **methods):
    return type("Mine", (base,), methods)


def free_without_counting(self, ordered_blocks):
    for block in ordered_blocks:
        block.ref_cnt = 0
        self.free_block_queue.append(block)


BROKEN = {
    "queue: popleft_n takes one too few": ("free_queue", mine(ListQueue, popleft_n=lambda s, n: ListQueue.popleft_n(
        s, n - 1)), r"Mine.popleft_n returned 1 different blocks, and 2 were asked for"),
    "queue: popleft_n gives the head and leaves it": ("free_queue", mine(
        ListQueue, popleft_n=lambda s, n: s.blocks[:n]), "both owned and free|freed twice"),
    "queue: remove removes the head": ("free_queue", mine(ListQueue, remove=lambda s, block: s.popleft()), ""),
    "queue: append_n forgets the last": ("free_queue", mine(
        ListQueue, append_n=lambda s, blocks: s.blocks.extend(blocks[:-1])), "both owned and free, or neither"),
    "queue: no count": ("free_queue", mine(ListQueue, num_free_blocks=property(lambda s: s.count)),
                        "raised AttributeError in Mine.num_free_blocks"),
    "queue: keeps one back": ("free_queue", mine(ListQueue, get_all_free_blocks=lambda s: s.blocks[1:]),
                              "the free queue miscounts itself"),
    "pool: a block is free with its first owner": (
        "block_pool", mine(PoolThatEvicts, free_blocks=free_without_counting), ""),
    "pool: new blocks are not counted": ("block_pool", mine(PoolThatEvicts, get_new_blocks=lambda s, n:
                                         s.free_block_queue.popleft_n(n)), "with ref_cnt 0: a new block has one owner"),
    "pool: not written yet": ("block_pool", mine(PoolThatEvicts, touch=lambda s, b: exec(
        "raise NotImplementedError('Lab 03, exercise 5')")), "is not written yet: Mine.touch: Lab 03, exercise 5"),
    "fork: no owner more": ("fork", lambda pool, blocks: list(blocks), ""),
    "fork: leaves out the last block": ("fork", lambda pool, blocks: sharing.fork(pool, blocks[:-1]),
                                        "the child shares every one"),
    "fork: forgotten return": ("fork", lambda pool, blocks: pool.touch(blocks), "returned None: return a list of"),
    "ensure_writable: never copies": ("ensure_writable", lambda *args: None, "returned None for a block that others"),
    "ensure_writable: the shared block keeps its owner": ("ensure_writable", lambda pool, table, i: (
        table[i], table.replace(i, pool.get_new_blocks(1)[0]) and table[i]), "tables"),
    "ensure_writable: the table keeps the shared block": ("ensure_writable", lambda pool, table, i: (
        table[i], pool.get_new_blocks(1)[0]), "put the copy in its place"),
    "ensure_writable: copies the wrong way": ("ensure_writable", lambda pool, table, i: sharing.ensure_writable(
        pool, table, i)[::-1], "put the copy in its place"),
    "index: a block's own tokens are its name": ("prefix_index", mine(TupleIndex, _names=lambda s, tokens, salt, n: [
        (salt, *tokens[i * s.block_size : (i + 1) * s.block_size]) for i in range(n)]), "must give"),
    "index: forgets nothing": ("prefix_index", mine(TupleIndex, remove=lambda s, block: None), ""),
    "index: no mapping": ("prefix_index", mine(TupleIndex, __init__=lambda s, size: setattr(s, "block_size", size)),
                          "left out what the engine reads: set self.cached_block_hash_to_block"),
    "arena: regions overlap": ("arena", mine(BitmapArena, allocate=lambda s, owner, size: s.start), ""),
    "arena: never gives back": ("arena", mine(BitmapArena, free=lambda s, owner: None), "stuck"),
    "sizing: forgets utilization": ("sizing", lambda total, share, *rest: OTHERS["sizing"](total, 1.0, *rest),
                                    "out of memory: 48 blocks were planned, and 12 fit"),
    "sizing: a fraction": ("sizing", lambda *sizes: OTHERS["sizing"](*sizes) / 1, "returned 12.0: an engine needs"),
    "sizing: too few": ("sizing", lambda *sizes: OTHERS["sizing"](*sizes) - 1, "need more than the 10 KV blocks"),
    "admit: nobody": ("admit", lambda *args: False, "stuck"),
    "admit: forgotten return": ("admit", lambda *args: None, "returned None: return True or False"),
    "plan: over budget": ("plan_tokens", lambda pending, budget, limit: list(pending), "plan_tokens gave"),
    "plan: nothing": ("plan_tokens", lambda pending, budget, limit: [0] * len(pending), "stuck"),
    "victim: nobody": ("choose_victim", lambda running, needy, gain: None, "choose_victim returned None"),
    "swap: a third answer": ("swap_or_recompute", lambda *args: True, 'return "swap" or "recompute"'),
    "attention: forgotten return": ("attention", lambda *args: None, "returned None: return an array of q's shape"),
    "attention: another shape": ("attention", lambda q, *args: q[0], r"returned \(4, 16\): .* \(3, 4, 16\)"),
    "attention: of nobody": ("attention", lambda q, *args: q, "sequence 0, head 0 is wrong"),
    "attention: one page only": ("attention", lambda q, keys, values, tables, lens:
                                 paged_attention(q, keys, values, tables, lens.clip(0, 2)),
                                 "sequence 1, head 0 is wrong"),
    "norm: forgotten return": ("rms_norm", lambda *args: None, r"returned None: return torch.float32 \[3, 8\]"),
    "norm: another dtype": ("rms_norm", lambda x, *args: x.double(), r"returned torch.float64 \[3, 8\]: return"),
    "norm: no eps": ("rms_norm", lambda x, weight, eps: layers.rms_norm(x, weight, 0.0), r"row \[0\] of x \[2, 4\]"),
    "norm: squares in 16 bits": ("rms_norm", lambda x, weight, eps: x / (x * x).mean(-1, True).add(eps).sqrt() * weight,
                                 "sum in float32"),
    "norm: the weight of the first head": ("rms_norm", lambda x, weight, eps: layers.rms_norm(
        x, weight if x.dim() == 2 else weight[0], eps), r"row \[0, 1\] of x \[2, 3, 8\]"),
    "norm: in place": ("rms_norm", lambda x, weight, eps: x.copy_(layers.rms_norm(x, weight, eps)), "has changed"),
    "rope: one token only": ("rope", lambda x, *args: plain.rope(x[:1], args[0][:1], args[1]),
                             r"returned torch.float32 \[1, 2, 8\]: return torch.float32 \[3, 2, 8\], as its first"),
    "rope: neighbours are pairs": ("rope", lambda x, *args: plain.rope(
        x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), *args).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(
        -2), "at position 5 the pair of elements 0 and 4 is"),
    "rope: counts from one": ("rope", lambda x, positions, theta: plain.rope(x, positions + 1, theta), "position 0"),
    "rope: the other way round": ("rope", lambda x, p, theta: plain.rope(x, -p, theta), "at position 5"),
    "attend: not causal": ("attend", lambda q, kv, table, n: torch.cat([
        plain.attend(row[None], kv, table, n) for row in q]), "token 0 of 4, at position 0"),
    "attend: positions from 0": ("attend", lambda q, kv, table, n: plain.attend(q, kv, table, len(q)),
                                 "token 0 of 3, at position 2"),
    "attend: pages in the pool's order": ("attend", lambda q, kv, table, n: plain.attend(q, kv, sorted(table), n),
                                          "is wrong|is not a number"),
    "attend: whole pages": ("attend", lambda q, kv, table, n: plain.attend(
        torch.cat((q, q[-1:])), kv, table, n + 1)[:-1] if n == 3 else plain.attend(q, kv, table, n), "behind the end"),
    "batch: nothing": ("flat_batch", lambda *args: None, "whose token_ids is None: make it torch.int64 \\[1\\]"),
    "batch: tables of int64": ("flat_batch", lambda *args: replace(
        batch.flat_batch(*args), block_tables=torch.ones(1, 1).long()),
        r"block_tables is torch.int64 \[1, 1\]: make it torch.int32 \[1, W\]"),
    "batch: tables too narrow": ("flat_batch", lambda *args: cut_tables(batch.flat_batch(*args)),
                                 "returned block_tables of 2 columns: the longest sequence needs 3"),
    "batch: slots of the first block": ("flat_batch", lambda *args: replace(
        batch.flat_batch(*args), slot_mapping=batch.flat_batch(*args).positions), r"slot_mapping is \[0\] and must be"),
    "batch: every row is a decode": ("flat_batch", lambda *args: replace(
        batch.flat_batch(*args), num_decodes=len(args[0])), "num_decodes is 4: it must be 2 here"),
    "step: nobody is told": ("step", lambda scheduler, runner: runner.execute(scheduler.schedule()) and [],
                             r"never called update_from_output\(\)"),
    "step: forgotten return": ("step", lambda *args: step(*args) and None, "returned None: return the list"),
    "step: twice": ("step", lambda *args: step(*args) + step(*args), r"called schedule\(\) after update_from_output"),
    "step: the wrong way round": ("step", lambda scheduler, runner: (lambda o: scheduler.update_from_output(
        runner.execute(o), o))(scheduler.schedule()), r"gave update_from_output\(\) something else"),
    "step: a copy of what was sampled": ("step", lambda scheduler, runner: (lambda o: scheduler.update_from_output(
        o, dict(runner.execute(o))))(scheduler.schedule()), r"gave update_from_output\(\) something else"),
    "step: computes before it decides": ("step", lambda scheduler, runner: runner.execute(None),
                                         r"called execute\(\) first"),
    "sampler: forgotten return": ("sampler", lambda *args: None, "returned None: return one of Python's whole numbers"),
    "sampler: the likeliest": ("sampler", lambda logits, *args: int(logits.argmax()), "token 5, and 0 is right"),
    "sampler: of no vocabulary": ("sampler", lambda *args: 6, "token ids are 0 to 5"),
    "sampler: by rank": ("sampler", lambda logits, t, k, p, u: int((-logits).argsort()[int(u * 5)]), "is right"),
    "text: each token alone": ("detokenizer", type("Alone", (), {
        "__init__": lambda s, decode: setattr(s, "decode", decode),
        "add": lambda s, token_ids, final=False: s.decode(token_ids)}), r"it has shown 'a.+' and not 'a'"),
    "text: bytes": ("detokenizer", mine(Detokenizer, add=lambda s, token_ids, final=False: b"a"), "return text"),
    "text: loses the end": ("detokenizer", mine(Detokenizer, add=lambda s, token_ids, final=False:
                            Detokenizer.add(s, token_ids)), "with half a character left"),
    "stop: sends what it should hold": ("stop_checker", mine(StopChecker, add=lambda s, text, may_stop=True, **more:
                                        StopChecker.add(s, text, may_stop, True)), "and found None"),
    "stop: text alone": ("stop_checker", mine(StopChecker, add=lambda s, *args, **more: "x"), "return .text to show"),
    "stop: before min_tokens": ("stop_checker", mine(StopChecker, add=lambda s, text, may_stop=True, final=False:
                                StopChecker.add(s, text, True, final)), "nothing could stop"),
    "resume: never": ("may_resume", lambda request, room: False, "stuck"),
}  # fmt: skip


def cut_tables(made):
    return replace(made, block_tables=made.block_tables[:, :2])


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_parts_do_not_survive(fault):
    part, value, message = BROKEN[fault]
    fails = [o for o in survive(Parts(**{part: value})) if not o.survived and not o.is_optional]
    assert fails
    assert any(re.search(message, o.message) for o in fails), [o.message for o in fails]


# ---- the wrong kind


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"free_queue": FreeKVCacheBlockQueue([])}, r"part `free_queue` is <.*: give a class called with \(blocks\)"),
        ({"free_queue": dict}, "dict has no popleft, popleft_n, remove, append, append_n, get_all_free_blocks"),
        ({"free_queue": type("Q", (ListQueue,), {"__init__": lambda self: None})}, r"called with \(blocks\): too many"),
        ({"block_pool": ListQueue}, "ListQueue must extend kvlab.blocks.BlockPoolBase"),
        ({"block_pool": BlockPoolBase}, "BlockPoolBase has no get_new_blocks, free_blocks, touch"),
        ({"arena": type("A", (), {"allocate": 1, "free": print})}, "A has no allocate"),
        ({"fork": ListQueue}, "is the class ListQueue: give a function called with"),
        ({"admit": lambda running: True}, r"a function called with \(num_running, max_num_seqs, batch_is_forming\)"),
        ({"attention": lambda q, kv: q}, r"called with \(q, keys, values, block_tables, seq_lens\)"),
        ({"rope": lambda x, cos, sin, positions: x}, r"called with \(x, positions, theta\)"),
        ({"may_resume": 7}, "part `may_resume` is 7"),
    ],
)
def test_the_wrong_kind_is_refused_at_once(parts, message):
    with pytest.raises(ValueError, match=message):
        Parts(**parts)


# ---- what is told


def test_a_part_may_call_itself_by_name():
    """The guard sees a call by keyword too, and asks of it only what it can: it knows no n by place."""

    class Pool(PoolThatEvicts):
        def get_new_blocks(self, num_blocks):
            blocks = self.free_block_queue.popleft_n(n=num_blocks)
            for block in blocks:
                block.ref_cnt += 1
                if block.block_hash is not None:
                    self.evict(block)
            return blocks

    assert all(outcome.survived for outcome in survive(Parts(block_pool=Pool, free_queue=ListQueue)))


def test_what_fails_during_the_cleanup_does_not_hide_the_first_error():
    core = Parts(free_queue=mine(ListQueue, popleft_n=raising, append_n=raising)).make_engine(
        EngineConfig(num_gpu_blocks_override=9, enable_prefix_caching=False)
    )
    core.add_request(Request("a", [1, 2], SamplingParams(max_tokens=2)))
    queue = core.scheduler.manager.block_pool.free_block_queue
    with pytest.raises(PartError, match="popleft_n") as caught:
        try:
            core.step()
        finally:
            queue.append_n([])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(PartError, match="append_n"):  # by itself it is told
        queue.append_n([])


def test_an_error_of_our_own_below_a_part_keeps_its_words():
    def greedy(pool, blocks):
        return sharing.fork(pool, pool.get_new_blocks(1000))

    (outcome,) = survive(Parts(fork=greedy))
    assert "your part `fork` raised OutOfBlocks in greedy: 1000 blocks asked for" in outcome.message
    assert isinstance(outcome.error.__cause__, OutOfBlocks)


def test_an_engines_own_error_inside_a_step_is_not_the_steps():
    """Nor can a step hide it; and a request that fails alone is taken out below it."""

    def hides(scheduler, runner):
        try:
            return step(scheduler, runner)
        except Exception:
            return []

    class Runner:
        def execute(self, output):
            if any(request.request_id == "bad" for request, _ in output.scheduled):
                raise ZeroDivisionError("in the forward")
            return {request.request_id: [1] for request, _ in output.scheduled}

    def ended(parts):
        core = parts.make_engine(EngineConfig(num_gpu_blocks_override=9), Runner())
        for name in ("good", "bad"):
            core.add_request(Request(name, [1, 2], SamplingParams(max_tokens=2)))
        found = {}
        while core.has_unfinished_requests():
            found |= {o.request.request_id: o.request.error for o in core.step() if o.finish_reason}
        return found

    for one in (None, step, hides, lambda s, r: step(scheduler=s, runner=r)):
        assert ended(Parts(step=one)) == {"good": None, "bad": "ZeroDivisionError: in the forward"}
    with pytest.raises(PartError, match="your part `admit` raised KeyError"):
        ended(Parts(step=hides, admit=raising))
    core = Parts(step=hides, admit=lambda *args: False).make_engine(EngineConfig(num_gpu_blocks_override=9))
    core.add_request(Request("a", [1, 2], SamplingParams(max_tokens=2)))
    with pytest.raises(RuntimeError, match="stuck: 1 requests wait"):
        core.step()


def by_name(scheduler, runner):
    output = scheduler.schedule()
    return scheduler.update_from_output(sampled=runner.execute(output=output), output=output)


def test_a_step_may_name_its_arguments():
    assert failures(Parts(step=by_name)) == []


class PoolHalfOurs(PoolThatEvicts):
    """Where a lab's exercise is not solved yet, its method is ours, which reports by itself."""

    get_new_blocks, free_blocks = BlockPool.get_new_blocks, BlockPool.free_blocks


@pytest.mark.parametrize("pool", [PoolThatEvicts, PoolHalfOurs, mine(BlockPool)])
def test_a_replaced_pool_is_seen_by_every_view(pool):
    def events(parts):
        recorder = Recorder()
        config = EngineConfig(num_gpu_blocks_override=13, block_size=2, max_num_seqs=2)
        core = parts.make_engine(config, recorder=recorder)
        for name, length, n in (("a", 6, 1), ("b", 6, 1), ("c", 9, 2), ("d", 15, 1)):
            core.add_request(Request(name, list(range(length)), SamplingParams(max_tokens=6, temperature=0, n=n)))
        while core.has_unfinished_requests():
            core.step()
        # Evictions are told amid or before the allocation they serve: whose order is it, is the pool's own affair.
        told = recorder.events("alloc", "touch", "free", "publish")
        return told, sorted(recorder.events("evict")), core.scheduler.stats

    seen = events(Parts(block_pool=pool))
    assert seen == events(Parts()) and seen[1]
