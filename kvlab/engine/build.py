"""From settings to an engine that can step: everything is made here, in the order in which it needs one another.

    settings -> EngineConfig -> weights -> the largest step, measured -> blocks that fit beside both
        -> KVCache -> attention backend -> ModelRunner -> EngineCore <- Scheduler

What it settles on the way (device, max_model_len, the numbers of blocks, no graphs for parts) it writes into the
EngineConfig.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import torch

from kvlab.config import EngineConfig
from kvlab.engine.core import EngineCore
from kvlab.engine.graphs import graph_bytes, make_graph_pool
from kvlab.engine.memory import check_max_model_len, choose_device, log_memory, out_of_memory, plan_blocks
from kvlab.engine.profile import Meter, meter_for, profile
from kvlab.engine.runner import ModelRunner
from kvlab.engine.tokenizer import Tokenizer
from kvlab.events import Recorder
from kvlab.model.awq_linear import uses_kernel
from kvlab.model.backends import choose_attention_backend
from kvlab.model.config import ModelConfig
from kvlab.model.decoder import CausalLM
from kvlab.model.hub import resolve_model
from kvlab.model.kv_cache import KVCache
from kvlab.model.loader import load_model
from kvlab.schedule import Policies, Scheduler

SMALLER_MODEL = (
    "use a smaller or a quantised model, or end what else uses the GPU; `kvlab plan` says what fits which GPU"
)
SMALLER_STEP = "lower max_num_batched_tokens, max_num_seqs or max_model_len, or end what else uses the GPU"
FEWER_BLOCKS = "lower gpu_memory_utilization, num_gpu_blocks_override or swap_space, or end what else uses the GPU"


class Built(NamedTuple):
    model: CausalLM
    model_config: ModelConfig
    tokenizer: Tokenizer
    engine_core: EngineCore


def make_config(engine_options: dict[str, Any]) -> EngineConfig:
    """ValueError names an unknown option, or an impossible value."""
    known = {field.name for field in fields(EngineConfig)}
    if unknown := sorted(set(engine_options) - known):
        raise ValueError(f"unknown engine option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
    return EngineConfig(**engine_options)


def build_engine(name: str, config: EngineConfig, policies: Policies | None = None, parts: Any = None,
                 recorder: Recorder | None = None, meter: Meter | None = None) -> Built:  # fmt: skip
    """Load the model `name` and make an engine for it. ValueError if it cannot be run so here, with the remedy.

    meter: what measures the device's memory; None takes CUDA's on a GPU, and on a CPU measures nothing.
    """
    if parts is not None:
        if not hasattr(parts, "make_manager"):
            raise ValueError(f"parts is {parts!r}: give a kvlab.Parts, such as Parts(free_queue=FreeQueue)")
        if policies is not None:
            raise ValueError("policies and parts are both given: name the policies in parts too")
        policies = parts.policies
    folder = resolve_model(name)
    config.device = choose_device(config.device)
    with out_of_memory(f"loading the weights of {name!r}", SMALLER_MODEL):
        awq_kernel = uses_kernel(config.attention_backend, config.device)
        model, model_config = load_model(folder, dtype=config.dtype, device=config.device, awq_kernel=awq_kernel,
                                         quantization=config.quantization)  # fmt: skip
    asked, known_positions = config.max_model_len, model_config.max_position_embeddings
    if asked is not None and asked > known_positions:
        raise ValueError(f"max_model_len is {asked}, but the model knows {known_positions} positions: use no more")
    config.max_model_len = asked or known_positions
    if parts is not None and (parts.batch_layout or parts.model_ops(model_config)):
        config.enforce_eager = True  # a CUDA graph runs no Python: it would replay what somebody's function did once
    dtype = model.dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)

    def make_runner(num_blocks: int, num_cpu_blocks: int = 0) -> ModelRunner:
        kv_cache = KVCache(model_config, num_blocks, config.block_size, dtype, config.device, num_cpu_blocks)
        # Before the tokenizer: transformers imports Triton too, which must be told first whether to interpret kernels.
        backend = choose_attention_backend(config.attention_backend, kv_cache, config.deterministic_split_tokens)
        ops = layout = None
        if parts is not None:
            backend = parts.attention_backend(kv_cache) or backend
            ops, layout = parts.model_ops(model_config), parts.batch_layout
        model.use(backend, ops)
        return ModelRunner(model, kv_cache, config.max_num_seqs, config.max_model_len, layout)

    memory, meter = None, meter or meter_for(config.device)
    if meter is not None and config.num_gpu_blocks_override is None:
        with out_of_memory("running the largest step", SMALLER_STEP):
            memory = profile(make_runner(2), config, meter, graph_bytes(config, model))
    sizing = () if parts is None else (parts.num_gpu_blocks,)
    num_gpu, num_cpu = plan_blocks(config, model_config, dtype, memory, *sizing)
    if asked is not None or config.reservation == "contiguous":
        check_max_model_len(config, num_gpu)
    config.num_gpu_blocks_override, config.num_cpu_blocks_override = num_gpu, num_cpu
    with out_of_memory(f"making {num_gpu} K/V blocks", FEWER_BLOCKS):
        runner = make_runner(num_gpu, num_cpu)
        runner.graphs = make_graph_pool(config, model)
        if config.device != "cpu":
            runner.warm_up(config.max_num_batched_tokens)
    if parts is not None and (sampler := parts.row_sampler()) is not None:
        runner.sampler = sampler
    log_memory(config, runner.kv_cache.bytes_per_block, memory)
    tokenizer = Tokenizer(folder)
    manager = None if parts is None else parts.make_manager(config, recorder)
    scheduler = Scheduler(config, manager, policies, recorder)
    one_step = () if parts is None else (parts.one_step,)
    return Built(model, model_config, tokenizer, EngineCore(scheduler, runner, *one_step))
