"""The OpenAI server: HTTP and asyncio on one thread, the engine on another, one report between them a step (lab 14).

    app       routes, errors          guard     before the routes: keys, body size, draining
    protocol  what a request may say  fields    what is ignored, what is refused and why
    prompts   text to token ids       completions, chat   answers in OpenAI's shapes
    answer    one answer on the wire, from its start in the engine to its last byte or the client's leaving
    desk      calls in flight, on the event loop: who may come in, who gets which part of a report
    engine_thread   the one thread that owns the engine          metrics   vLLM's names
    server    the socket, the signals, the exit code             args      the settings
    background  the same on a thread, for a notebook             reading   what a client makes of bytes and of metrics
"""

from importlib import import_module

_HOME = {
    "EngineThread": "kvlab.serve.engine_thread",
    "ServerArgs": "kvlab.serve.args",
    "make_app": "kvlab.serve.app",
    "serving": "kvlab.serve.background",
    "serve": "kvlab.serve.server",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.serve' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        needs = f"{name} needs the package {error.name!r}: pip install -c constraints.txt -e '.[engine,serve]'"
        raise ModuleNotFoundError(needs, name=error.name) from error
