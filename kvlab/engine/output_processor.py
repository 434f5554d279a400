"""What steps bring, made into what users see: text, stop strings, finish reasons, one RequestOutput.

    EngineCoreOutput (tokens of one sequence) -> Detokenizer -> StopChecker -> StreamDelta, and into RequestOutput

It runs right after the step, before the next is scheduled, so that a sequence whose text has met a stop string
computes nothing more. Every continuation gets exactly one finish reason, and every request one usage record.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.engine.logits import Logprob
from kvlab.engine.outputs import CompletionOutput, RequestOutput, StreamDelta, Usage
from kvlab.engine.text import Detokenizer, StopChecker
from kvlab.engine.tokenizer import Tokenizer
from kvlab.schedule import EngineCoreOutput, Request, RequestStatus, Scheduler


@dataclass
class Family:
    """One request with the continuations it has so far."""

    request: Request
    output: RequestOutput
    num_left: int
    completions: dict[int, CompletionOutput] = field(default_factory=dict)
    texts: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # detokenizer and stop checker


def usage(family: Family) -> Usage:
    tokens = sum(len(completion.token_ids) for completion in family.completions.values())
    return Usage(family.request.num_prompt_tokens, tokens, family.request.num_cached_tokens or 0)


class OutputProcessor:
    """Follows the requests that were registered with it; outputs of others are passed over.

    make_detokenizer, make_stop_checker: replacements for ours (lab 14).
    """

    def __init__(self, tokenizer: Tokenizer, scheduler: Scheduler, make_detokenizer: Callable = Detokenizer,
                 make_stop_checker: Callable = StopChecker):  # fmt: skip
        self._tokenizer = tokenizer
        self._make_detokenizer, self._make_stop_checker = make_detokenizer, make_stop_checker
        self._scheduler = scheduler
        self._families: dict[str, Family] = {}

    def register(self, request: Request, prompt: str | None) -> None:
        output = RequestOutput(request.request_id, prompt, request.prompt_token_ids)
        self._families[request.request_id] = Family(request, output, request.num_to_fork + 1)

    def is_unfinished(self, request_id: str) -> bool:
        family = self._families[request_id]
        return family.num_left > 0 and self._scheduler.is_unfinished(request_id)

    def process(self, outputs: list[EngineCoreOutput]) -> list[StreamDelta]:
        """Take in one step's outputs; what each adds, for those who stream."""
        deltas = []
        for output in outputs:
            family = self._families.get(output.request.parent_id)
            if family is None:
                continue
            deltas.append(self._add(family, output))
            if output.finish_reason is not None:
                # One that ends before its children are born ends them too: each index gets its finish reason.
                for index in range(1, output.request.num_to_fork + 1):
                    family.completions[index] = replace(family.completions[0], index=index, token_ids=[])
                    deltas.append(replace(deltas[-1], index=index))
            if family.num_left == 0:  # with this output, whatever ended it
                deltas[-1].usage = family.output.usage = usage(family)
        return deltas

    def _add(self, family: Family, output: EngineCoreOutput) -> StreamDelta:
        sequence, params = output.request, output.request.sampling_params
        index = sequence.child_index
        if index not in family.completions:
            family.completions[index] = CompletionOutput(index, "", [])
            family.texts[index] = (
                self._make_detokenizer(self._tokenizer.decode),
                self._make_stop_checker(params.stop, params.include_stop_str_in_output),
            )
        completion, (detokenizer, stop_checker) = family.completions[index], family.texts[index]

        finish_reason, stop_reason = output.finish_reason, sequence.stop_reason
        shown = output.new_token_ids
        if finish_reason == "stop" and not params.include_stop_str_in_output:
            shown = shown[:-1]  # the token that ended it is no text
        text = detokenizer.add(shown, final=finish_reason is not None)
        may_stop = sequence.num_output_tokens >= params.min_tokens
        text, stop_string = stop_checker.add(text, may_stop, final=finish_reason is not None)
        if stop_string is not None:
            if finish_reason is None:
                self._scheduler.finish_sequences([sequence], RequestStatus.FINISHED_STOPPED)
            finish_reason, stop_reason = "stop", stop_string
        completion.text += text
        completion.token_ids += output.new_token_ids
        logprobs = self._take_logprobs(family, completion, output) if output.logprobs else None
        if finish_reason is not None:
            completion.finish_reason, completion.stop_reason = finish_reason, stop_reason
            family.output.error = family.output.error or sequence.error
            family.num_left -= 1 + sequence.num_to_fork
        return StreamDelta(family.request.request_id, index, text, output.new_token_ids, finish_reason,
                           sequence.error, logprobs, stop_reason=stop_reason)  # fmt: skip

    def _take_logprobs(self, family: Family, completion: CompletionOutput,
                       output: EngineCoreOutput) -> list[dict[int, Logprob]] | None:  # fmt: skip
        """Sum them up; keep and return them, with texts, if they were asked for (and not only by best_of)."""
        for token, entry in zip(output.new_token_ids, output.logprobs, strict=True):
            completion.cumulative_logprob += entry[token].logprob
        if family.request.sampling_params.logprobs is None:
            return None
        new = [self._with_text(entry) for entry in output.logprobs]
        completion.logprobs = (completion.logprobs or []) + new
        return new

    def _with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        return {t: replace(logprob, decoded_token=self._tokenizer.decode([t])) for t, logprob in entry.items()}

    def output(self, request_id: str) -> RequestOutput:
        """Everything known of a request."""
        family = self._families[request_id]
        params = family.request.sampling_params
        completions = [family.completions[index] for index in sorted(family.completions)]
        if len(completions) > params.n:  # best_of: the likeliest come first, and only n of them
            completions.sort(key=lambda c: c.cumulative_logprob, reverse=True)
            completions = [replace(completion, index=i) for i, completion in enumerate(completions[: params.n])]
        family.output.outputs = completions
        if params.prompt_logprobs is not None:
            known = family.request.prompt_logprobs
            family.output.prompt_logprobs = [
                self._with_text(known[i]) if i in known else None for i in range(family.request.num_prompt_tokens)
            ]
        family.output.num_cached_tokens = family.request.num_cached_tokens or 0
        family.output.finished = not self.is_unfinished(request_id)
        return family.output

    def forget(self, request_id: str) -> None:
        self._families.pop(request_id, None)
