"""kvlab: the textbook that runs. One small LLM engine, layer by layer, each layer a lab.

Everything public can be imported from here; nothing heavy is loaded until it is used, so the plain
layers (and the labs on them) start fast and need neither torch nor triton:

    from kvlab import LLM, SamplingParams          # the engine: loads torch on first use
    from kvlab import BlockPool, KVCacheManager    # plain Python
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Recorder": "kvlab.events",
    "EngineConfig": "kvlab.config",
    "SamplingParams": "kvlab.sampling_params",
    "BeamSearchParams": "kvlab.sampling_params",
    "KVCacheBlock": "kvlab.blocks",
    "FreeKVCacheBlockQueue": "kvlab.blocks",
    "BlockPool": "kvlab.blocks",
    "BlockTable": "kvlab.blocks",
    "OutOfBlocks": "kvlab.blocks",
    "HashChainIndex": "kvlab.prefix",
    "RadixTreeIndex": "kvlab.prefix",
    "KVCacheManager": "kvlab.manager",
    "ContiguousKVCacheManager": "kvlab.contiguous",
    "Request": "kvlab.schedule",
    "RequestStatus": "kvlab.schedule",
    "Policies": "kvlab.schedule",
    "Scheduler": "kvlab.schedule",
    "SchedulerOutput": "kvlab.schedule",
    "EngineCore": "kvlab.engine",
    "LLMEngine": "kvlab.engine",
    "LLM": "kvlab.engine",
    "Branch": "kvlab.engine",
    "RequestOutput": "kvlab.engine",
    "BeamSearchOutput": "kvlab.engine",
    "CompletionOutput": "kvlab.engine",
    "StreamDelta": "kvlab.engine",
    "Parts": "kvlab.parts",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}; public names: {', '.join(_HOME)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return sorted(__all__)
