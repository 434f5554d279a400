"""Parts: the replacements, checked when they are named, guarded when they are used."""

from dataclasses import dataclass, fields
from inspect import unwrap
from typing import Any

from kvlab import sizing
from kvlab.blocks import BlockPool
from kvlab.config import EngineConfig
from kvlab.engine.core import EngineCore, Runner, step
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.parts.guard import guard_class, guard_function
from kvlab.parts.kinds import KINDS
from kvlab.parts.step import guard_step
from kvlab.schedule import Policies, Scheduler
from kvlab.schedule.scheduler import make_manager
from kvlab.sim import SlotEchoRunner

POLICIES = tuple(field.name for field in fields(Policies))
MANAGER = ("arena", "free_queue", "block_pool", "fork", "ensure_writable", "prefix_index")


@dataclass(frozen=True)
class Parts:
    """Replacements for parts of the engine; None is ours. ValueError if one is not of its kind (KINDS).

    sizing: as kvlab.sizing.num_gpu_blocks; plans the engine's blocks (lab 01).
    arena: class (capacity, start=1) with allocate(owner, size) and free(owner); with reservation="contiguous" (lab 02).
    free_queue: class (blocks) as FreeKVCacheBlockQueue. block_pool: extends BlockPoolBase (lab 03).
    fork, ensure_writable: as in kvlab.blocks.sharing (lab 04).
    prefix_index: class (block_size) as PrefixIndex (labs 05, 06); with enable_prefix_caching.
    admit, plan_tokens, choose_victim, swap_or_recompute, may_resume: as in kvlab.schedule.policies (labs 07 to 09).
    attention: as kvlab.standin.decode.paged_attention; decodes on a CPU (labs 10, 11).
    rms_norm, rope, attend, flat_batch: torch functions, described in kvlab.parts.kinds (lab 12). Beside `attention`,
        `attend` computes the chunks only.
    step: as kvlab.engine.core.step; who fails in a step stays ours to find (lab 13).
    sampler: function (logits, temperature, top_k, top_p, uniform) -> token id, for one row: logits is a NumPy array
        of float64 [vocab]; temperature 0 is greedy, top_k 0 and top_p 1 are off (lab 13).
    detokenizer, stop_checker: classes (decode) and (stop, include_stop) as those of kvlab.engine.text (lab 14).
    attention, the four of lab 12, sampler and the two of lab 14 need a model: slot-echo has no place for them.
    """

    sizing: Any = None
    arena: Any = None
    free_queue: Any = None
    block_pool: Any = None
    fork: Any = None
    ensure_writable: Any = None
    prefix_index: Any = None
    admit: Any = None
    plan_tokens: Any = None
    choose_victim: Any = None
    swap_or_recompute: Any = None
    may_resume: Any = None
    attention: Any = None
    rms_norm: Any = None
    rope: Any = None
    attend: Any = None
    flat_batch: Any = None
    sampler: Any = None
    detokenizer: Any = None
    stop_checker: Any = None
    step: Any = None

    def __post_init__(self):
        for name, value in self.replaced.items():
            KINDS[name].check(name, value)

    @property
    def replaced(self) -> dict[str, Any]:
        """What is not ours, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def __or__(self, other: "Parts") -> "Parts":
        """These parts, and those of `other` in their place where both replace one."""
        return Parts(**self.replaced | other.replaced)

    def _guarded(self, names: tuple[str, ...]) -> dict[str, Any]:
        found = {}
        for name, value in self.replaced.items():
            kind = KINDS[name]
            if name not in names:
                continue
            if kind.is_class:
                found[name] = guard_class(name, value, kind.methods, kind.attributes)
            else:
                found[name] = guard_function(name, value, kind.complaint)
        return found

    @property
    def policies(self) -> Policies:
        """The scheduler's decisions."""
        return Policies(**self._guarded(POLICIES))

    def num_gpu_blocks(self, *args, **kwargs) -> int:
        """`sizing`, or ours: see kvlab.sizing.num_gpu_blocks."""
        return self._guarded(("sizing",)).get("sizing", sizing.num_gpu_blocks)(*args, **kwargs)

    def attention_backend(self, kv_cache: Any) -> Any:
        """An AttentionBackend of `attention` (the decodes) and `attend` (the rest); None if neither is replaced.

        ValueError if `attention` cannot read this KVCache.
        """
        functions = self._guarded(("attention", "attend"))
        if not functions:
            return None
        from kvlab.model.part_attention import PartAttention  # needs torch, which other parts do without

        backend = PartAttention(**functions)
        backend.check(kv_cache)
        return backend

    def model_ops(self, model_config: Any) -> Any:
        """What stands between the matrix products, by `rms_norm` and `rope`; None if neither is replaced.

        ValueError if `rope` cannot say what this model's positions are.
        """
        functions = self._guarded(("rms_norm", "rope"))
        if not functions:
            return None
        from kvlab.model.part_ops import PartOps

        return PartOps(model_config, **functions)

    @property
    def batch_layout(self) -> Any:
        """`flat_batch`, with which the runner lays out a step; None if it is not replaced."""
        return self._guarded(("flat_batch",)).get("flat_batch")

    def row_sampler(self) -> Any:
        """A sampler for the runner that asks `sampler` for each row; None if it is not replaced."""
        function = self._guarded(("sampler",)).get("sampler")
        if function is None:
            return None
        from kvlab.engine.part_sampler import PartSampler  # needs torch

        return PartSampler(function)

    @property
    def one_step(self) -> Any:
        """The step function of EngineCore: `step`, watched, or ours."""
        return step if self.step is None else guard_step(self.step, KINDS["step"].complaint)

    @property
    def text_makers(self) -> dict[str, Any]:
        """What the OutputProcessor is to make texts with, where it is not ours."""
        return {f"make_{name}": part for name, part in self._guarded(("detokenizer", "stop_checker")).items()}

    def make_manager(self, config: EngineConfig, recorder: Recorder | None = None) -> KVCacheManager:
        """The manager that `config` asks for, made of these parts."""
        parts = self._guarded(MANAGER)
        if "block_pool" in parts and not issubclass(parts["block_pool"], BlockPool):
            parts["block_pool"] = _reporting(parts["block_pool"])
        return make_manager(config, recorder, **parts)

    def make_engine(self, config: EngineConfig, runner: Runner | None = None,
                    recorder: Recorder | None = None) -> EngineCore:  # fmt: skip
        """An engine of these parts without a model: by default on slot-echo, which needs no torch.

        config: num_gpu_blocks_override must be set. runner: what computes in its stead.
        """
        scheduler = Scheduler(config, self.make_manager(config, recorder), self.policies, recorder)
        if runner is None:
            runner = SlotEchoRunner(config.num_gpu_blocks_override, config.block_size,
                                    config.num_cpu_blocks_override or 0)  # fmt: skip
        return EngineCore(scheduler, runner, self.one_step)


def _reporting(pool: type) -> type:
    """A pool that tells the recorder what it does, as ours does, so that every view shows a student's pool as well.

    A method that is ours, as one is in a lab until it is solved, tells it itself.
    """
    named = {"alloc": "get_new_blocks", "touch": "touch", "free": "free_blocks"}
    silent = {kind for kind, name in named.items() if unwrap(getattr(pool, name)) is not getattr(BlockPool, name)}

    class Reporting(pool):
        def get_new_blocks(self, num_blocks):
            blocks = super().get_new_blocks(num_blocks)
            self._report("alloc", blocks)
            return blocks

        def touch(self, blocks):
            blocks = list(blocks)
            super().touch(blocks)
            self._report("touch", blocks)

        def free_blocks(self, ordered_blocks):
            blocks = list(ordered_blocks)
            super().free_blocks(blocks)
            self._report("free", [block for block in blocks if block.ref_cnt == 0])

        def _report(self, kind, blocks):
            if kind in silent and self.recorder is not None and blocks:
                self.recorder.emit(kind, None, [block.block_id for block in blocks])

    Reporting.__name__ = Reporting.__qualname__ = pool.__name__
    return Reporting
