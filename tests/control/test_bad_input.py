"""Bad input: an error that names the value and the remedy, and nothing changed."""

import pytest
from driving import engine, request, run, snapshot, want

from kvlab.blocks import BlockPool
from kvlab.config import EngineConfig
from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.swap import SwapSpace

CONFIG = [
    (dict(block_size=0), "block_size is 0: .*16 is usual"),
    (dict(block_size=2.5), "block_size is 2.5: use a whole number"),
    (dict(block_size=True), "block_size is True"),
    (dict(num_gpu_blocks_override=1), "num_gpu_blocks_override is 1: .*null block and at least one more"),
    (dict(num_cpu_blocks_override=-1), "num_cpu_blocks_override is -1: .*0 is no swap space"),
    (dict(max_model_len=1), "max_model_len is 1: .*prompt of 1 token and 1 output"),
    (dict(max_num_seqs=0), "max_num_seqs is 0: .*at least one"),
    (dict(max_num_batched_tokens=0), "max_num_batched_tokens is 0"),
    (dict(long_prefill_token_threshold=-3), "long_prefill_token_threshold is -3: .*0 is no limit"),
    (dict(gpu_memory_utilization=0), r"gpu_memory_utilization is 0: use a share in \(0, 1\]"),
    (dict(gpu_memory_utilization=1.01), "gpu_memory_utilization is 1.01"),
    (dict(gpu_memory_utilization=float("nan")), "gpu_memory_utilization is nan"),
    (dict(gpu_memory_utilization="0.9"), "gpu_memory_utilization is '0.9'"),
    (dict(swap_space=-1), "swap_space is -1 GiB: use 0 for none"),
    (dict(swap_space=float("nan")), "swap_space is nan GiB"),
    (dict(swap_space="4"), "swap_space is '4' GiB"),
    (dict(seed=1.5), "seed is 1.5"),
    (dict(batching="dynamic"), "batching is 'dynamic': use one of continuous, static"),
    (dict(reservation="none"), "reservation is 'none': use one of paged, contiguous"),
    (dict(dtype="int4"), "dtype is 'int4': use one of auto"),
    (dict(enable_chunked_prefill=False, max_model_len=100, max_num_batched_tokens=99),
     r"\(99\) must be at least .*\(100\)"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), CONFIG)
def test_config(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


PARAMS = [
    (dict(n=0), "n is 0: ask for n >= 1"),
    (dict(n=1.0), "n is 1.0"),
    (dict(max_tokens=0), "max_tokens is 0: ask for at least 1 token, or None"),
    (dict(temperature=-0.1), "temperature is -0.1: use 0 for greedy"),
    (dict(temperature=float("nan")), "temperature is nan"),
    (dict(temperature=float("inf")), "temperature is inf"),
    (dict(top_k=-2), "top_k is -2: use k >= 1, or 0"),
    (dict(top_p=0), r"top_p is 0: use a share in \(0, 1\]"),
    (dict(top_p=1.5), "top_p is 1.5"),
    (dict(seed="x"), "seed is 'x': use a whole number or None"),
    (dict(stop_token_ids=["a"]), r"stop_token_ids is \('a',\): give whole numbers"),
    (dict(stop_token_ids=5), "stop_token_ids is 5: give whole numbers"),
    (dict(stop_token_ids=None), "stop_token_ids is None: give whole numbers"),
    (dict(min_tokens=-1), "min_tokens is -1"),
    (dict(min_tokens=17), r"min_tokens is 17: it must not exceed max_tokens \(16\)"),
]


@pytest.mark.parametrize(("params", "message"), PARAMS)
def test_sampling_params(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def with_params(name, prompt, **params):
    return Request(name, prompt, SamplingParams(temperature=0, seed=0, **params))


REQUESTS = [
    (lambda: request("here", 3), "'here': this id is in use; give each unfinished request an id of its own"),
    (lambda: request("a#1", 3), "'a#1': '#' is kept for the ids of children"),
    (lambda: request("x", []), "'x': the prompt is empty; give at least one token"),
    (lambda: request("x", 30), "the prompt has 30 tokens and max_model_len is 30, .*shorten the prompt to 29"),
    (lambda: request("x", 29, max_tokens=1), "29 prompt tokens and 1 outputs need more than the 5 KV blocks of 4"),
    (lambda: request("x", 10, max_tokens=15), "lower max_tokens to 11, or give the engine more blocks"),
    (lambda: with_params("x", [1, "two"]), "'two'.*whole numbers"),
    (lambda: with_params("x", [1, 2.0]), "2.0.*whole numbers"),
    (lambda: with_params("x", [1, -1]), "-1.*whole numbers"),
    (lambda: with_params("x", [1, 2**63]), "9223372036854775808.*whole numbers"),
]


@pytest.mark.parametrize(("make", "message"), REQUESTS)
def test_a_request_that_cannot_be_served_is_refused_and_the_rest_go_on(make, message):
    core = engine(usable=5, max_model_len=30)
    core.add_request(here := request("here", 6))
    core.step()
    bad = make()
    before = snapshot(core.scheduler)
    with pytest.raises(ValueError, match=message):
        core.add_request(bad)
    assert snapshot(core.scheduler) == before and bad.status.value == "waiting"
    assert run(core)["here"] == want(here)[1:]


def test_a_request_that_has_run_is_not_added_again():
    core = engine()
    core.add_request(req := request("a", 3))
    run(core)
    with pytest.raises(ValueError, match="'a': .*has run already.*make a new Request"):
        core.add_request(req)
    core.add_request(again := request("a", 3))  # the id is free again
    assert run(core)["a"] == want(again)


def test_without_chunked_prefill_a_request_that_no_step_could_take_is_refused():
    core = engine(enable_chunked_prefill=False, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="without chunked prefill must fit the 8 of one step"):
        core.add_request(request("a", 9, max_tokens=1))
    with pytest.raises(ValueError, match="may grow to 10 computed tokens"):  # preempted, it would be stuck
        core.add_request(request("a", 6, max_tokens=5))
    core.add_request(request("a", 6, max_tokens=3))
    assert len(run(core)["a"]) == 3


def test_blocks_and_managers():
    for call, message in [
        (lambda: BlockPool(1), "num_gpu_blocks is 1: a pool needs the null block and at least one more"),
        (lambda: BlockPool(5, enable_caching=True), r"pass prefix_index=HashChainIndex\(block_size\)"),
        (lambda: BlockPool(5).get_new_blocks(-1), "n is -1: ask for 0 or more"),
        (lambda: BlockPool(5).get_new_blocks(5), "5 blocks asked for, 4 are free: free or preempt"),
        (lambda: KVCacheManager(5, 0), "block_size is 0: .*16 is usual"),
        (lambda: KVCacheManager(0, 4), "num_gpu_blocks is 0"),
        (lambda: KVCacheManager(5, 4, num_cpu_blocks=-2), "num_cpu_blocks is -2: use 0 for no swap space"),
        (lambda: KVCacheManager(5, 4, prefix_index=HashChainIndex(8)), "block_size of the prefix index is 8.*4"),
        (lambda: KVCacheManager(5, 4).allocate_slots(request("a", 3), 0), "num_new_tokens is 0: .*at least 1"),
        (lambda: HashChainIndex(0), "block_size is 0"),
        (lambda: HashChainIndex(4).insert([1, 2], BlockPool(5).get_new_blocks(1)),
         "2 tokens do not fill 1 blocks of 4"),
        (lambda: HashChainIndex(4).remove(BlockPool(5).blocks[1]), "block 1 is not published"),
        (lambda: SwapSpace(-1), "num_cpu_blocks is -1"),
        (lambda: Recorder(0), "capacity is 0"),
        (lambda: Scheduler(EngineConfig()), "num_gpu_blocks_override is None: set it, or pass a manager"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_a_contiguous_reservation_that_is_too_short_or_too_long_is_refused_when_added():
    """Never later: growth past the reserved run would take blocks that the arena will give to somebody else."""
    manager = ContiguousKVCacheManager(11, 4, 12)
    core = engine(usable=10, manager=manager)
    with pytest.raises(ValueError, match="outputs need more"):
        core.add_request(request("a", 8, max_tokens=6))  # 13 slots
    core.add_request(request("b", 8, max_tokens=5))
    assert len(run(core)["b"]) == 5
    with pytest.raises(ValueError, match="41 tokens.*10 blocks of 4"):
        ContiguousKVCacheManager(11, 4, 41)


def test_a_reserving_function_that_promises_too_little_is_an_error_and_no_corruption():
    manager = ContiguousKVCacheManager(11, 4, lambda req: 8)
    req = request("a", 12)
    with pytest.raises(ValueError, match="'a' reserves 8 slots but needs 12"):
        manager.allocate_slots(req, 12)
    manager.allocate_slots(req, 8)
    req.num_computed_tokens = 8
    with pytest.raises(ValueError, match="'a' reserves 8 slots but needs 9"):
        manager.allocate_slots(req, 1)
    manager.free(req)
    assert manager.usage == 0 and manager.arena.free_total == 10
