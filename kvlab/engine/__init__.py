"""The engine: scheduler, runner and sampler in one step loop (lab 13), and its front doors.

    LLM (text in, text out)
     '-> LLMEngine (a step at a time, made by build)  ->  EngineCore.step()  ->  Scheduler.schedule()
                                                                                 ModelRunner.execute(), update

EngineCore is plain Python and runs any runner, also one without a model (kvlab.sim.SlotEchoRunner).
"""

from importlib import import_module

_HOME = {
    "EngineCore": "kvlab.engine.core",
    "LLMEngine": "kvlab.engine.llm_engine",
    "LLM": "kvlab.engine.llm",
    "ModelRunner": "kvlab.engine.runner",
    "Branch": "kvlab.engine.branch",
    "BeamSearchOutput": "kvlab.engine.beam",
    "CompletionOutput": "kvlab.engine.outputs",
    "RequestOutput": "kvlab.engine.outputs",
    "StreamDelta": "kvlab.engine.outputs",
    "Usage": "kvlab.engine.outputs",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.engine' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
