"""LLMEngine: a model, its paged KV cache and its scheduler, driven a step at a time (vLLM's name).

    engine = LLMEngine("tiny")
    request = engine.add_request("What is a KV cache?", SamplingParams(max_tokens=40))
    while engine.has_unfinished_requests():
        for delta in engine.step(): print(delta.request_id, delta.text)

Whoever serves many at once calls it so (kvlab.serve). LLM stands on it, for those who want answers and not steps.
"""

import itertools
from collections.abc import Iterable
from dataclasses import asdict
from numbers import Integral
from typing import Any

from kvlab.engine.branch import Branch
from kvlab.engine.build import build_engine, make_config
from kvlab.engine.interrupts import interrupts_wait
from kvlab.engine.output_processor import OutputProcessor
from kvlab.engine.outputs import StreamDelta
from kvlab.engine.prompts import Prompt, bare
from kvlab.events import Recorder
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import EngineCoreOutput, Policies, Request


class LLMEngine:
    """A model, its paged KV cache and the scheduler. One thread owns it.

    model: "tiny" (shipped), a folder in Hugging Face form, or a hub id.
    policies: decisions to replace (kvlab.schedule.policies). parts: a kvlab.Parts, to replace more.
    recorder: receives every event.
    engine_options: the fields of kvlab.EngineConfig. ValueError names an unknown or impossible one.
    """

    def __init__(self, model: str = "tiny", *, policies: Policies | None = None, parts: Any = None,
                 recorder: Recorder | None = None, **engine_options):  # fmt: skip
        self.config = make_config(engine_options)
        built = build_engine(model, self.config, policies, parts, recorder)
        self.model, self.model_config, self.tokenizer, self.engine_core = built
        texts = {} if parts is None else parts.text_makers
        self.processor = OutputProcessor(self.tokenizer, self.engine_core.scheduler, **texts)
        self._ids = itertools.count()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams, *, priority: int = 0,
                    cache_salt: str | None = None, name: str = "", where: str = "") -> Request:  # fmt: skip
        """Queue one prompt for the steps to come; `where` goes before the words of an error.

        The id is a number, behind `name` if one is given. ValueError, and nothing changed, if it can never be served.
        """
        prompt = bare(prompt)
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"{where}sampling_params is {sampling_params!r}: give a SamplingParams")
        if sampling_params.stop and not self.tokenizer.exists:
            raise ValueError(f"{where}stop strings need a tokenizer, and this model has none: use stop_token_ids")
        if isinstance(prompt, Branch):
            token_ids, held = prompt.token_ids, prompt.held_in(self, where, cache_salt)
            cache_salt = held.cache_salt
        else:
            token_ids, held = self.token_ids_of(prompt, where), None
        self._check_tokens(sampling_params.stop_token_ids, where, "stop_token_ids")
        self._check_tokens(sampling_params.logit_bias or (), where, "logit_bias")
        request = Request(self.next_id(name), token_ids, sampling_params, eos_token_ids=self.model_config.eos_token_ids,
                          priority=priority, cache_salt=cache_salt)  # fmt: skip
        request.held = held
        with interrupts_wait():
            self.start(request, where)
            self.processor.register(request, prompt if isinstance(prompt, str) else None)
        return request

    def step(self) -> list[StreamDelta]:
        """One step of the engine; what it brought for each continuation. The last delta of a request has its usage."""
        with interrupts_wait():
            return self.deliver(self.engine_core.step())

    def deliver(self, outputs: list[EngineCoreOutput]) -> list[StreamDelta]:
        """Make text of what the engine has brought, for those whose requests were added here."""
        return self.processor.process(outputs)

    def has_unfinished_requests(self) -> bool:
        return self.engine_core.has_unfinished_requests()

    def abort_request(self, request_id: str) -> None:
        """End what is unfinished of a request, and forget it; ids that have ended or are unknown are harmless."""
        with interrupts_wait():
            self.engine_core.abort_request(request_id)
            self.processor.forget(request_id)

    def token_ids_of(self, prompt: Prompt, where: str = "", add_special_tokens: bool = True) -> list[int]:
        """Token ids of text or of token ids. ValueError if they are not for this model."""
        if not hasattr(prompt, "__len__") or isinstance(prompt, bytes):
            raise ValueError(f"{where}the prompt is {prompt!r}: give text or a list of token ids")
        token_ids = self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(token_ids, where, "prompt")
        return [int(token_id) for token_id in token_ids]  # whatever kind of whole number they were

    def _check_tokens(self, token_ids: Iterable[int], where: str, name: str) -> None:
        size = self.model_config.vocab_size
        for token_id in token_ids:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool) or not 0 <= token_id < size:
                raise ValueError(f"{where}{name} holds {token_id!r}: token ids are whole numbers, 0 to {size - 1}")

    def start(self, request: Request, where: str = "") -> None:
        """Hand a request to the scheduler. ValueError, with `where` before its words, if it can never be served."""
        try:
            self.engine_core.add_request(request)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def next_id(self, name: str = "") -> str:
        """An id that no request or branch here has had: a number, behind `name` if one is given."""
        return f"{name}-{next(self._ids)}" if name else str(next(self._ids))

    def stats(self) -> dict[str, float]:
        """The scheduler's counters, and the state of the pool right now."""
        scheduler = self.engine_core.scheduler
        return {
            **asdict(scheduler.stats),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_gpu_blocks": self.config.num_gpu_blocks_override,
            "usage": scheduler.manager.usage,
        }
