"""LLM: the engine's front door, in one object (vLLM's name and shape).

    llm = LLM("tiny")
    llm.generate(["What is a KV cache?"], SamplingParams(max_tokens=40))[0].outputs[0].text
    llm.chat([{"role": "user", "content": "What is a block table?"}])
    for delta in llm.stream("..."): print(delta.text, end="")
    llm.add_request("...", params); llm.step()               # a step at a time: LLMEngine, which this is, too
    llm.branch("...").fork()                                 # held between calls: kvlab.engine.branch

All prompts of a call run together: what they share is computed once, and each leaves the batch as it finishes.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from kvlab.engine.beam import BeamSearchOutput, beam_output
from kvlab.engine.branch import Branch
from kvlab.engine.core import EngineCore
from kvlab.engine.interrupts import interrupts_wait
from kvlab.engine.llm_engine import LLMEngine
from kvlab.engine.outputs import RequestOutput, StreamDelta
from kvlab.engine.prompts import Prompt, as_list, bare, is_conversation
from kvlab.sampling_params import BeamSearchParams, SamplingParams
from kvlab.schedule import EngineCoreOutput, Request, beam_request

Params = SamplingParams | Sequence[SamplingParams] | None
GREEDY = SamplingParams(temperature=0, max_tokens=128)


class LLM(LLMEngine):
    """An LLMEngine, which is where its settings are told, with calls that return when their prompts are finished.

    What one call's steps bring for another is kept for it, so calls, open streams and single steps may alternate.
    """

    def __init__(self, model: str = "tiny", **options):
        super().__init__(model, **options)
        self._inboxes: dict[str, deque[StreamDelta]] = {}

    @property
    def engine(self) -> EngineCore:
        return self.engine_core

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
                request = beam_request(self.next_id(), token_ids, params, eos_token_ids=eos)
                with interrupts_wait():
                    self.start(request, where)
                    requests.append(request)
            while any(self.engine_core.scheduler.is_unfinished(request.request_id) for request in requests):
                self.step()
            return [
                beam_output(request, prompt if isinstance(prompt, str) else None, self.tokenizer)
                for request, prompt in zip(requests, prompts, strict=True)
            ]
        finally:
            for request in requests:
                self.engine_core.abort_request(request.request_id)

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
        held = self.engine_core.scheduler.hold(self.next_id("branch"), self.token_ids_of(prompt), cache_salt)
        branch = Branch(self, held)
        try:
            branch.compute()
        except BaseException:
            branch.free()
            raise
        return branch

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
        """The same, and a copy for whoever waits for it in a call that is under way."""
        deltas = super().deliver(outputs)
        for delta in deltas:
            if delta.request_id in self._inboxes:
                self._inboxes[delta.request_id].append(delta)
        return deltas

    def abort_request(self, request_id: str) -> None:
        with interrupts_wait():
            super().abort_request(request_id)
            self._inboxes.pop(request_id, None)
