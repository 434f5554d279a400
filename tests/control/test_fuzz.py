"""Random workloads through the real scheduler and manager on the slot-echo model (fuzz.py), and the fuzz itself
tested: each of the faults below, put into the code on purpose, must be caught."""

import inspect
import textwrap
from collections import Counter

import fuzz
import pytest

from kvlab.blocks import BlockPool, BlockPoolBase, FreeKVCacheBlockQueue, sharing
from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex, hash_chain
from kvlab.schedule import Request, RequestQueue, Scheduler
from kvlab.sim import SlotEchoRunner
from kvlab.swap import SwapSpace

CHUNK = 250

# What a chunk of 250 workloads must have come across, or it has tested nothing of that kind.
MUST_HAPPEN = [
    "refused", "ended: stop", "ended: length", "ended: abort", "ended: error", "copies failed", "failed alone",
    "id used again", "num_copy_on_writes", "num_preemptions_recompute", "num_preemptions_swap",
    "num_swapped_in_blocks", "num_prefix_hit_tokens", "aborted between steps: decoding",
    "aborted between steps: mid-prefill", "aborted between steps: waiting", "aborted before the runner: decoding",
]  # fmt: skip


@pytest.mark.parametrize("chunk", range(8))
def test_fuzz(chunk):
    seen = fuzz.run_range(chunk * CHUNK, (chunk + 1) * CHUNK)
    assert seen["workloads"] == CHUNK
    assert [kind for kind in MUST_HAPPEN if not seen[kind]] == []


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(50))
def test_fuzz_long(chunk):
    seen = fuzz.run_range(10_000 + chunk * 1_000, 10_000 + (chunk + 1) * 1_000)
    rare = [f"aborted {when}: {state}" for when in ("between steps", "before the runner")
            for state in ("preempted", "swapped", "mid-prefill", "decoding", "waiting")]  # fmt: skip
    assert [kind for kind in MUST_HAPPEN + rare if not seen[kind]] == []


def test_a_workload_is_made_from_its_number_alone():
    first, again, other = fuzz.Fuzz(11).run(), fuzz.Fuzz(11).run(), fuzz.Fuzz(12).run()
    assert first == again != other


def test_a_failure_names_its_workload(monkeypatch):
    monkeypatch.setattr(fuzz.Fuzz, "run", lambda self: 1 / 0)
    with pytest.raises(AssertionError, match=r"workload 7 failed .*python tests/control/fuzz.py 7"):
        fuzz.run_range(7, 9)


# ---- the faults: (where, method, what it says, what it says with the fault)

FAULTS = {
    # publishing
    "publish one block too many": (
        KVCacheManager, "cache_blocks",
        "num_full = num_computed_tokens // self.block_size",
        "num_full = min(num_computed_tokens // self.block_size + 1, request.num_tokens // self.block_size)"),
    "publish before the forward": (
        KVCacheManager, "allocate_slots",
        "table.extend(new)",
        "table.extend(new); self.cache_blocks(request, request.num_computed_tokens + num_new_tokens)"),
    "publish under another's cursor": (
        KVCacheManager, "free", "self._published.pop(request.request_id, None)", "pass"),
    # identity
    "hit on the whole prompt": (
        KVCacheManager, "get_computed_blocks", "(request.num_tokens - 1) //", "request.num_tokens //"),
    "hash without parent": (hash_chain, "_chain", "sha256(parent + data", "sha256(data"),
    "hash without salt": (hash_chain, "root_key", "if salt is None", "if True"),
    "the second publisher takes the name": (
        HashChainIndex, "insert", "and key not in self.cached_block_hash_to_block", ""),
    "stale hash on reuse": (BlockPool, "get_new_blocks", "self.evict(block)", "pass"),
    "the index forgets, the block does not": (HashChainIndex, "remove", "block.block_hash = None", "pass"),
    # counting
    "no null block": (BlockPoolBase, "__init__", "free_queue(self.blocks[1:])", "free_queue(self.blocks)"),
    "free without counting references": (
        BlockPool, "free_blocks", "block.ref_cnt -= 1", "block.ref_cnt = 0"),
    "a hit stays in the free queue": (BlockPool, "touch", "self.free_block_queue.remove(block)", "pass"),
    "free hits do not count against capacity": (
        KVCacheManager, "_start", "sum(block.ref_cnt == 0 for block in held)", "0"),
    "new blocks are taken before the hits": (
        KVCacheManager, "_start",
        "self.block_pool.touch(held)  # before taking new ones, which would evict them\n"
        "    new = self.block_pool.get_new_blocks(num_new)",
        "new = self.block_pool.get_new_blocks(num_new)\n    self.block_pool.touch(held)"),
    "a link back is left dangling": (
        FreeKVCacheBlockQueue, "popleft_n", "block.prev_free_block = self.head", "pass"),
    "a run of blocks is not given back": (
        ContiguousKVCacheManager, "free", "self.arena.free(request.request_id)", "pass"),
    # copy-on-write and fork
    "forget the copy": (
        KVCacheManager, "_copy_on_write",
        'self._block_ops.append(("copy", shared.block_id, copy.block_id))', "pass"),
    "copy after the write": (
        SlotEchoRunner, "execute", "return sampled",
        "[self.gpu.__setitem__(d, list(self.gpu[s])) for k, s, d in output.block_ops if k == 'copy']\n"
        "    return sampled"),
    "every block is writable": (
        KVCacheManager, "allocate_slots", "tail is not None and not tail.is_writable", "False"),
    "the copy is not counted": (
        KVCacheManager, "allocate_slots", "if num_new + must_copy >", "if num_new >"),
    "fork takes no reference": (sharing, "fork", "pool.touch(blocks)", "pass"),
    "fork leaves out the block that is not full": (
        KVCacheManager, "fork", "cdiv(computed, self.block_size)]",
        "computed // self.block_size]"),
    # swap
    "swap in without the next token's block": (
        KVCacheManager, "_start", "total = cdiv(computed + num_new_tokens, self.block_size)",
        "total = cdiv(computed + (0 if request.num_computed_tokens else num_new_tokens), self.block_size)"),
    "a block that is written keeps its link": (
        KVCacheManager, "allocate_slots", "self.swap_space.unlink(tail)", "pass"),
    "a freed block keeps its link": (KVCacheManager, "_give_back", "self.swap_space.unlink(block)", "pass"),
    "swap out what fits": (SwapSpace, "swap_out", "return None", "new = new[: len(self._free)]"),
    "swap space is not given back": (KVCacheManager, "free", "self.swap_space.release(request.request_id)", "pass"),
    "a shared CPU block is freed with its first owner": (
        SwapSpace, "release", "if self._ref_cnt[cpu] == 0:", "if cpu not in self._free:"),
    "swap in to the wrong end": (
        KVCacheManager, "_start", "enumerate(shared)", "enumerate(shared[::-1])"),
    # scheduling
    "a victim keeps its tokens": (Scheduler, "_preempt", "scheduled.pop(victim.request_id, None)", "pass"),
    "a victim's tokens are counted for ever": (
        Scheduler, "_budget_left", "- sum([num_tokens for _, num_tokens in scheduled.values()])", ""),
    "admission in a step with preemption": (Scheduler, "schedule", "if output.preempted:", "if False:"),
    "K/V dropped and still counted": (Scheduler, "_drop", "request.num_computed_tokens = 0", "pass"),
    "hits are not counted as computed": (
        Scheduler, "_schedule_waiting", "computed = max(request.num_computed_tokens, num_hit_tokens)",
        "computed = request.num_computed_tokens"),
    "seats are not counted when children are born": (
        Scheduler, "_fork_children", "len(self.running) < self.config.max_num_seqs and ", ""),
    "who was aborted meanwhile still advances": (
        Scheduler, "update_from_output", "if request.status is not running:", "if False:"),
    "a failed copy is forgiven": (
        Scheduler, "fail_step", "[request for request, _ in output.scheduled]", "[]"),
    "a failed way to swap space is forgiven": (Scheduler, "fail_step", "self._drop(request)", "pass"),
    "a victim is forgotten": (Scheduler, "_preempt", "self.waiting.add(victim)", "pass"),
    "one sibling's failure ends the family": (
        Scheduler, "fail_requests", "self.finish_sequences(requests, RequestStatus.FINISHED_ERROR, error)",
        "self.finish_requests([r.request_id for r in requests], RequestStatus.FINISHED_ERROR, error)"),
    "children share one seed": (Request, "make_child", "self.seed + index", "self.seed"),
    "one token too many": (Request, "append_output_token", ">= self.max_num_tokens", "> self.max_num_tokens"),
    "an aborted request still waits": (RequestQueue, "remove", "del self._members[request.request_id]", "pass"),
    "one order of arrival for all": (
        RequestQueue, "add", "(request.sort_key, self._num_added", "((0,), self._num_added"),
    # the model
    "random numbers restart after a preemption": (
        SlotEchoRunner, "execute", "request.num_output_tokens\n",
        "request.num_output_tokens * (request.num_preemptions == 0)\n"),
    "a chunk that is not the last samples": (SlotEchoRunner, "execute", "if end == request.num_tokens:", "if True:"),
}  # fmt: skip


def break_it(monkeypatch, where, name: str, old: str, new: str) -> None:
    """Replace one function of `where` by its own source with `old` turned into `new`, as often as it stands there."""
    found = inspect.getattr_static(where, name)
    function = found.fget if isinstance(found, property) else found
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{name} no longer says {old!r}: state the fault anew"
    source = source.replace("super()", "super(type(self), self)")  # a method outside its class knows no other way
    scope: dict = {}
    exec(compile(source.replace(old, new), f"<{name} with a fault>", "exec"), function.__globals__, scope)
    monkeypatch.setattr(where, name, scope[name])


def workloads_until_caught(most: int = 600) -> int:
    for number in range(most):
        try:
            fuzz.Fuzz(number).run()
        except Exception:
            return number + 1
    return 0


@pytest.mark.parametrize("fault", FAULTS)
def test_fuzz_catches_faults(monkeypatch, fault):
    break_it(monkeypatch, *FAULTS[fault])
    monkeypatch.setattr(KVCacheManager, "check", lambda self: None)  # our own audit must do
    monkeypatch.setattr(fuzz, "MAX_STEPS", 1_000)
    assert workloads_until_caught(), f"nobody noticed: {fault}"


if __name__ == "__main__":  # how soon each is noticed
    patch = pytest.MonkeyPatch()
    soon = Counter()
    for fault in FAULTS:
        with patch.context() as one:
            break_it(one, *FAULTS[fault])
            soon[fault] = workloads_until_caught(3000)
    for fault, number in soon.most_common():
        print(f"{number:6}  {fault}")
