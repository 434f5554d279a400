"""What the directed tests share: small requests, and an engine on the slot-echo model."""

from kvlab.config import EngineConfig
from kvlab.engine.core import EngineCore
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.sim import SlotEchoRunner, echo_generate


def request(name, prompt, max_tokens=4, n=1, **more) -> Request:
    """A greedy request without stop tokens; `prompt` may be a number of tokens."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return Request(name, tokens, SamplingParams(n=n, temperature=0, seed=0, max_tokens=max_tokens), **more)


def engine(block_size=4, usable=20, runner=None, policies=None, recorder=None, manager=None, **settings) -> EngineCore:
    """An EngineCore with `usable` blocks besides the null block."""
    config = EngineConfig(block_size=block_size, num_gpu_blocks_override=usable + 1, **settings)
    scheduler = Scheduler(config, manager, policies, recorder)
    num_cpu = config.num_cpu_blocks_override or 0
    return EngineCore(scheduler, runner or SlotEchoRunner(usable + 1, block_size, num_cpu))


def run(core: EngineCore, most: int = 2000) -> dict[str, list[int]]:
    """Step to the end, checking; the tokens of each sequence by id, only those that did not fail."""
    got: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            got.setdefault(output.request.request_id, []).extend(output.new_token_ids)
        core.scheduler.manager.check()
        most -= 1
        assert most, "it does not end"
    return got


def want(req: Request, index: int = 0) -> list[int]:
    """What continuation `index` must be."""
    return echo_generate(req.prompt_token_ids, req.sampling_params, (req.seed or 0) + index,
                         req.eos_token_ids, max_num_tokens=req.max_num_tokens or None)  # fmt: skip


def snapshot(scheduler: Scheduler):
    """All that a refusal must leave as it was."""
    pool = scheduler.manager.block_pool
    return (
        list(scheduler.requests), list(scheduler.waiting), list(scheduler.running), vars(scheduler.stats).copy(),
        [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        [(b.ref_cnt, b.block_hash) for b in pool.blocks],
        {k: v.block_ids for k, v in scheduler.manager.req_to_blocks.items()},
    )  # fmt: skip
