"""LLM: the engine's front door, in one object (vLLM's name and shape).

    llm = LLM("tiny")
    llm.generate(["What is a KV cache?"], SamplingParams(max_tokens=40))[0].outputs[0].text
    llm.chat([{"role": "user", "content": "What is a block table?"}])
    for delta in llm.stream("..."): print(delta.text, end="")
    llm.add_request("...", params); llm.step()               # a step at a time, for many at once: kvlab.serve
    llm.branch("...").fork()                                 # held between calls: kvlab.engine.branch

All prompts of a call run together: what they share is computed once, and each leaves the batch as it finishes.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from numbers import Integral
from typing import Any

import torch

from kvlab.config import EngineConfig
from kvlab.engine.beam import BeamSearchOutput, beam_output
from kvlab.engine.branch import Branch
from kvlab.engine.core import EngineCore
from kvlab.engine.graphs import make_graph_pool
from kvlab.engine.interrupts import interrupts_wait
from kvlab.engine.memory import check_max_model_len, choose_device, plan_blocks
from kvlab.engine.output_processor import OutputProcessor
from kvlab.engine.outputs import RequestOutput, StreamDelta
from kvlab.engine.prompts import Prompt, as_list, bare, is_conversation
from kvlab.engine.runner import ModelRunner
from kvlab.engine.tokenizer import Tokenizer
from kvlab.events import Recorder
from kvlab.model.attention import choose_attention_backend
from kvlab.model.awq_linear import uses_kernel
from kvlab.model.kv_cache import KVCache
from kvlab.model.loader import load_model, resolve_model
from kvlab.sampling_params import BeamSearchParams, SamplingParams
from kvlab.schedule import EngineCoreOutput, Policies, Request, Scheduler, beam_request

Params = SamplingParams | Sequence[SamplingParams] | None
GREEDY = SamplingParams(temperature=0, max_tokens=128)


class LLM:
    """A model, its paged KV cache and the scheduler.

    model: "tiny" (shipped), a folder in Hugging Face form, or a hub id.
    policies: decisions to replace (kvlab.schedule.policies). parts: a kvlab.Parts, to replace more.
    recorder: receives every event.
    engine_options: the fields of kvlab.EngineConfig. ValueError names an unknown or impossible one.
    """

    def __init__(self, model: str = "tiny", *, policies: Policies | None = None, parts: Any = None,
                 recorder: Recorder | None = None, **engine_options):  # fmt: skip
        if parts is not None:
            if not hasattr(parts, "make_manager"):
                raise ValueError(f"parts is {parts!r}: give a kvlab.Parts, such as Parts(free_queue=FreeQueue)")
            if policies is not None:
                raise ValueError("policies and parts are both given: name the policies in parts too")
            policies = parts.policies
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(engine_options) - known):
            raise ValueError(f"unknown engine option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        config = self.config = EngineConfig(**engine_options)
        folder = resolve_model(model)
        config.device = choose_device(config.device)
        awq_kernel = uses_kernel(config.attention_backend, config.device)
        self.model, self.model_config = load_model(folder, dtype=config.dtype, device=config.device,
                                                   awq_kernel=awq_kernel, quantization=config.quantization)  # fmt: skip
        asked, known_positions = config.max_model_len, self.model_config.max_position_embeddings
        if asked is not None and asked > known_positions:
            raise ValueError(f"max_model_len is {asked}, but the model knows {known_positions} positions: use no more")
        config.max_model_len = asked or known_positions

        dtype = self.model.dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
        sizing = () if parts is None else (parts.num_gpu_blocks,)
        num_gpu, num_cpu = plan_blocks(config, self.model_config, dtype, *sizing)
        if asked is not None or config.reservation == "contiguous":
            check_max_model_len(config, num_gpu)
        config.num_gpu_blocks_override, config.num_cpu_blocks_override = num_gpu, num_cpu
        kv_cache = KVCache(self.model_config, num_gpu, config.block_size, dtype, config.device, num_cpu)
        # Before the tokenizer: transformers imports Triton too, which must be told first whether to interpret kernels.
        backend = choose_attention_backend(config.attention_backend, kv_cache, config.deterministic_split_tokens)
        ops = layout = None
        if parts is not None:
            backend = parts.attention_backend(kv_cache) or backend
            ops, layout = parts.model_ops(self.model_config), parts.batch_layout
        self.model.use(backend, ops)
        self.tokenizer = Tokenizer(folder)
        manager = None if parts is None else parts.make_manager(config, recorder)
        scheduler = Scheduler(config, manager, policies, recorder)
        runner = ModelRunner(self.model, kv_cache, config.max_num_seqs, config.max_model_len, layout)
        runner.graphs = make_graph_pool(config, self.model)
        if config.device != "cpu":
            runner.warm_up(config.max_num_batched_tokens)
        if parts is not None and (sampler := parts.row_sampler()) is not None:
            runner.sampler = sampler
        self.engine = EngineCore(scheduler, runner, *(() if parts is None else (parts.one_step,)))
        self._ids = itertools.count()
        texts = {} if parts is None else parts.text_makers
        self.processor = OutputProcessor(self.tokenizer, scheduler, **texts)
        self._inboxes: dict[str, deque[StreamDelta]] = {}

    # ---- generating

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *,
                 priority: int | Sequence[int] = 0, cache_salt: str | None = None) -> list[RequestOutput]:  # fmt: skip
        """Continue every prompt; outputs in the order of the prompts.

        A prompt is text, token ids, vLLM's {"prompt": text} or {"prompt_token_ids": ids}, or a held Branch, whose
        tokens the output becomes.

        sampling_params: one for all or one each; None is greedy, up to 128 tokens.
        priority: one for all or one each; smaller goes first, and may preempt strictly larger ones.
        cache_salt: only requests with the same salt share cached blocks.
        ValueError, and nothing started, if a prompt can never be served. A request that fails later has
        finish_reason "error" and its `error` says why; the others are not touched by it.
        """
        prompts = as_list(prompts)
        params = [sampling_params or GREEDY] * len(prompts)
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(prompts):
                raise ValueError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one each")
            params = list(sampling_params)
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(prompts):
            raise ValueError(f"{len(priorities)} priorities for {len(prompts)} prompts: give one each")
        requests: list[Request] = []
        try:
            for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                where = f"prompt {i}: " if len(prompts) > 1 else ""
                requests.append(self._begin(prompt, param, priorities[i], cache_salt, where))
            for request in requests:
                for _ in self._run(request.request_id):
                    pass  # the processor keeps what each step brought
            return [self.processor.output(request.request_id) for request in requests]
        finally:
            for request in requests:
                self.abort_request(request.request_id)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of every prompt, as `transformers` does with num_beams (L33 2.4).

        Beams share their blocks by fork; all prompts run together. ValueError, and nothing started, if a group of
        beams can never be served as a whole: too wide for the seats, the budget, the pool or the vocabulary.
        """
        prompts = [bare(prompt) for prompt in as_list(prompts)]
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is {params!r}: give a BeamSearchParams")
        eos = self.model_config.eos_token_ids
        if params.beam_width + len(eos) > self.model_config.vocab_size:
            raise ValueError(
                f"beam_width is {params.beam_width}, and of {self.model_config.vocab_size} tokens {len(eos)} end the "
                f"sequence: use a beam_width of at most {self.model_config.vocab_size - len(eos)}"
            )
        requests: list[Request] = []
        try:
            for i, prompt in enumerate(prompts):
                where = f"prompt {i}: " if len(prompts) > 1 else ""
                token_ids = self.token_ids_of(prompt, where)
                request = beam_request(str(next(self._ids)), token_ids, params, eos_token_ids=eos)
                with interrupts_wait():
                    self._start(request, where)
                    requests.append(request)
            while any(self.engine.scheduler.is_unfinished(request.request_id) for request in requests):
                self.step()
            return [
                beam_output(request, prompt if isinstance(prompt, str) else None, self.tokenizer)
                for request, prompt in zip(requests, prompts, strict=True)
            ]
        finally:
            for request in requests:
                self.engine.abort_request(request.request_id)

    def chat(self, messages: Sequence, sampling_params: Params = None, **options) -> list[RequestOutput]:
        """Answer one conversation [{"role", "content"}, ...] or a list of them, by the model's chat template.

        options: those of `generate`.
        """
        if messages and isinstance(messages[0], dict):
            messages = [messages]
        return self.generate([self.tokenizer.apply_chat_template(m) for m in messages], sampling_params, **options)

    def stream(self, prompt: Prompt | Sequence[dict],
               sampling_params: SamplingParams | None = None, *, priority: int = 0,
               cache_salt: str | None = None) -> Iterator[StreamDelta]:  # fmt: skip
        """Yield what each step adds, as it comes. `prompt` may be a conversation. Leaving the loop aborts the rest."""
        if sampling_params is not None and sampling_params.num_sequences > sampling_params.n:
            raise ValueError(f"best_of is {sampling_params.best_of}: which are best is known at the end; use generate")
        prompt = self._templated(prompt)
        request = self._begin(prompt, sampling_params or GREEDY, priority, cache_salt)
        deltas = self._deltas(request.request_id)
        next(deltas)  # started, so that it cleans up behind itself even if nobody ever reads it
        return deltas

    def branch(self, prompt: Prompt | Sequence[dict], *, cache_salt: str | None = None) -> Branch:
        """Hold `prompt` (also a conversation) between calls, and compute its K/V now, so that forks share it.

        ValueError, and nothing held, if it could never be served; RuntimeError if the model fails at it.
        """
        prompt = bare(self._templated(prompt))
        held = self.engine.scheduler.hold(self.next_branch_id(), self.token_ids_of(prompt), cache_salt)
        branch = Branch(self, held)
        try:
            branch.compute()
        except BaseException:
            branch.free()
            raise
        return branch

    def next_branch_id(self) -> str:
        return f"branch-{next(self._ids)}"

    def _templated(self, prompt: Prompt | Sequence[dict]) -> Prompt:
        return self.tokenizer.apply_chat_template(prompt) if is_conversation(prompt) else prompt

    def _deltas(self, request_id: str) -> Iterator[StreamDelta]:
        try:
            yield None
            yield from self._run(request_id)
        finally:
            self.abort_request(request_id)

    def _run(self, request_id: str) -> Iterator[StreamDelta]:
        """Step the engine until the request has ended; what each step brought for it.

        Steps that another call makes meanwhile are not lost: everything goes through the request's inbox.
        """
        inbox = self._inboxes[request_id]
        while inbox or self.processor.is_unfinished(request_id):
            while inbox:
                yield inbox.popleft()
            if self.processor.is_unfinished(request_id):
                self.step()

    def _begin(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str | None,
               where: str = "") -> Request:  # fmt: skip
        with interrupts_wait():
            request = self.add_request(prompt, params, priority=priority, cache_salt=cache_salt, where=where)
            self._inboxes[request.request_id] = deque()
        return request

    def deliver(self, outputs: list[EngineCoreOutput]) -> list[StreamDelta]:
        """Make text of what the engine has brought, and put it where those who asked for it will look."""
        deltas = self.processor.process(outputs)
        for delta in deltas:
            if delta.request_id in self._inboxes:
                self._inboxes[delta.request_id].append(delta)
        return deltas

    # ---- one step at a time, for who serves many at once (kvlab.serve)

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
        request_id = f"{name}-{next(self._ids)}" if name else str(next(self._ids))
        request = Request(request_id, token_ids, sampling_params, eos_token_ids=self.model_config.eos_token_ids,
                          priority=priority, cache_salt=cache_salt)  # fmt: skip
        request.held = held
        with interrupts_wait():
            self._start(request, where)
            self.processor.register(request, prompt if isinstance(prompt, str) else None)
        return request

    def step(self) -> list[StreamDelta]:
        """One step of the engine; what it brought for each continuation. The last delta of a request has its usage."""
        with interrupts_wait():
            return self.deliver(self.engine.step())

    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests()

    def abort_request(self, request_id: str) -> None:
        """End what is unfinished of a request, and forget it; ids that have ended or are unknown are harmless."""
        with interrupts_wait():
            self.engine.abort_request(request_id)
            self._inboxes.pop(request_id, None)
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

    def _start(self, request: Request, where: str) -> None:
        try:
            self.engine.add_request(request)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def stats(self) -> dict[str, float]:
        """The scheduler's counters, and the state of the pool right now."""
        scheduler = self.engine.scheduler
        return {
            **asdict(scheduler.stats),
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_gpu_blocks": self.config.num_gpu_blocks_override,
            "usage": scheduler.manager.usage,
        }
