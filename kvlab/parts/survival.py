"""The smallest configurations that each part must survive, and a run through them on the slot-echo model.

    SMALLEST[part] -> engine of that part and ours -> its requests -> every token as echo_generate gives it,
                                                                      manager.check() after every step

Small on purpose: a handful of blocks, so that the part is used hard and what goes wrong can be followed by hand.
A part that loops for ever is not stopped here; run what you do not trust in a process of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlab import sizing
from kvlab.config import EngineConfig
from kvlab.engine.core import EngineCore
from kvlab.parts.alone import ALONE
from kvlab.parts.compose import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request
from kvlab.sim import echo_generate

MAX_STEPS = 1_000


@dataclass(frozen=True)
class Smallest:
    """One small run. options: of EngineConfig; `usable` blocks come on top of the null block.

    requests: (prompt, max_tokens, n); they arrive together. is_optional: a part may be right and fail it.
    """

    name: str
    usable: int
    options: dict[str, Any]
    requests: tuple[tuple[tuple[int, ...], int, int], ...]
    is_optional: bool = False


def _ask(prompt: Sequence[int] | int, max_tokens: int, n: int = 1) -> tuple[tuple[int, ...], int, int]:
    if isinstance(prompt, int):  # a number of tokens: others for every length, so that nobody's K/V is like another's
        prompt = range(10 * prompt, 11 * prompt)
    return tuple(prompt), max_tokens, n


_PLAIN = {"block_size": 2, "enable_prefix_caching": False}
_CACHED = {"block_size": 2, "max_num_seqs": 1}  # one after the other: the second finds what the first has left
# Three share a beginning, one does not and pushes it out, and then it is wanted again.
_SHARING = (_ask([7, 7, 8, 8, 1], 3), _ask([7, 7, 8, 8, 2, 3], 3), _ask([7, 7, 9], 2), _ask(12, 4),
            _ask([7, 7, 8, 8, 1, 4], 3))  # fmt: skip
_CROWD = tuple(_ask([token], 9) for token in (1, 2, 3))  # all come in, and then they grow
_TIGHT = {"block_size": 2, "num_cpu_blocks_override": 8, "enable_prefix_caching": False}
# A made-up GPU, in bytes: 90 blocks of 100 would fit its memory; of them 60% less weights and the rest leave 12.
_GPU = (9_000, 0.6, 3_000, 950, 250, 100)

SMALLEST: dict[str, tuple[Smallest, ...]] = {
    "sizing": (Smallest("a GPU of 9,000 bytes", sizing.num_gpu_blocks(*_GPU) - 1, _PLAIN, (_ask(21, 2),)),),
    "arena": (Smallest("two regions, five requests", 8, {**_PLAIN, "reservation": "contiguous", "max_model_len": 8},
                       (_ask(3, 5), _ask(5, 2), _ask(1, 7), _ask(2, 3), _ask(6, 1))),),
    "free_queue": (
        Smallest("caching off", 4, {"block_size": 1, "enable_prefix_caching": False}, (_ask(2, 2), _ask(1, 3))),
        Smallest("hits taken from the middle", 9, _CACHED, _SHARING),
    ),
    "block_pool": (
        Smallest("caching off", 6, _PLAIN, (_ask(3, 4), _ask(5, 2), _ask(4, 3, n=2))),
        Smallest("caching on", 9, _CACHED, _SHARING, is_optional=True),  # needs to evict, the last exercise
    ),
    "fork": (Smallest("three samples of one prompt", 12, _PLAIN, (_ask(5, 4, n=3),)),),
    "ensure_writable": (Smallest("three samples of a prompt of one block and a half", 9, _PLAIN, (_ask(3, 4, n=3),)),),
    "prefix_index": (
        Smallest("a shared beginning, pushed out and back", 9, _CACHED, _SHARING),
        Smallest("blocks of one token", 10, {**_CACHED, "block_size": 1}, (_ask([5, 5], 2), _ask([5, 5, 5], 2))),
    ),
    "admit": (Smallest("two seats, five requests", 20, {**_PLAIN, "max_num_seqs": 2},
                       (_ask(3, 5), _ask(5, 2), _ask(1, 7), _ask(2, 3), _ask(6, 1))),),
    "plan_tokens": (Smallest("three tokens a step", 20, {**_PLAIN, "max_num_batched_tokens": 3},
                             (_ask(2, 6), _ask(7, 3), _ask(5, 2))),),
    "choose_victim": (Smallest("six blocks for three that grow", 6, _TIGHT, _CROWD),),
    "swap_or_recompute": (Smallest("six blocks for three that grow", 6, _TIGHT, _CROWD),),
    "may_resume": (Smallest("six blocks for three that grow", 6, _TIGHT, _CROWD),),
    **dict.fromkeys(ALONE, ()),  # slot-echo has no place for them: they are called by themselves
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What happened. part: its name, or "all together". message: what went wrong, else "". error: where it says so.

    stats: the scheduler's counters. is_optional: the part may be right although it failed here.
    """

    part: str
    configuration: str
    message: str
    stats: dict[str, float]
    is_optional: bool = False
    error: Exception | None = None

    @property
    def survived(self) -> bool:
        return not self.message


def survive(parts: Parts) -> list[Outcome]:
    """Run each replaced part alone, then all together, through the smallest configurations of each."""
    outcomes = []
    for name, value in parts.replaced.items():
        if name in ALONE:
            outcomes.append(_call(name, parts))
            continue
        outcomes += [_run(name, Parts(**{name: value}), smallest) for smallest in SMALLEST[name]]
    if len(parts.replaced) > 1:
        needs_it_off = any(outcome.part == "block_pool" and not outcome.survived for outcome in outcomes)
        for name in parts.replaced:
            for smallest in SMALLEST[name]:
                if not smallest.is_optional:
                    if needs_it_off:
                        smallest = replace(smallest, options={**smallest.options, "enable_prefix_caching": False})
                    outcomes.append(_run("all together", parts, smallest))
    return outcomes


def _run(part: str, parts: Parts, smallest: Smallest) -> Outcome:
    core, message, error = None, "", None
    try:
        core = _engine(parts, smallest)
        _generate(core, smallest)
    except Exception as raised:
        message, error = str(raised) or type(raised).__name__, raised
    stats = dict(vars(core.scheduler.stats)) if core is not None else {}
    return Outcome(part, smallest.name, message, stats, smallest.is_optional, error)


def _call(part: str, parts: Parts) -> Outcome:
    """A part that needs a model, called by itself beside loops that say what is meant."""
    message, error = "", None
    where, check = ALONE[part]
    try:
        check(parts._guarded((part,))[part])
    except Exception as raised:
        message, error = str(raised) or type(raised).__name__, raised
    return Outcome(part, where, message, {}, error=error)


def _engine(parts: Parts, smallest: Smallest) -> EngineCore:
    num_blocks = smallest.usable + 1
    if parts.sizing is not None:
        planned, fits = parts.num_gpu_blocks(*_GPU), sizing.num_gpu_blocks(*_GPU)
        if planned > fits:
            raise ValueError(f"out of memory: {planned} blocks were planned, and {fits} fit")
        num_blocks = min(num_blocks, planned)
    return parts.make_engine(EngineConfig(num_gpu_blocks_override=num_blocks, **smallest.options))


def _generate(core: EngineCore, smallest: Smallest) -> None:
    """AssertionError, ValueError or what a part raises, unless every token and every count is right."""
    manager = core.scheduler.manager
    requests, got = [], {}
    for number, (prompt, max_tokens, n) in enumerate(smallest.requests):
        params = SamplingParams(n=n, temperature=1.0 if n > 1 else 0, seed=number, max_tokens=max_tokens)
        requests.append(Request(str(number), prompt, params))
        core.add_request(requests[-1])
    for _ in range(MAX_STEPS):
        if not core.has_unfinished_requests():
            break
        for output in core.step():
            got.setdefault(output.request.request_id, []).extend(output.new_token_ids)
            assert output.request.error is None, output.request.error
        manager.check()
    else:
        raise AssertionError(f"after {MAX_STEPS} steps {len(core.scheduler.requests)} requests are not done")
    for request in requests:
        for index in range(request.sampling_params.n):
            name = f"{request.request_id}#{index}" if index else request.request_id
            want = echo_generate(request.prompt_token_ids, request.sampling_params, request.seed + index)
            assert got.get(name) == want, f"request {name} must give {want} and gave {got.get(name)}"
