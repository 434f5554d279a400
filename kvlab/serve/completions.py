"""/v1/completions in OpenAI's form: text in, text out, a prompt's choices one after the other."""

from collections.abc import Sequence
from typing import Any

from kvlab.engine.logits import Logprob
from kvlab.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from kvlab.engine.text import Detokenizer
from kvlab.serve.shape import Shape, rounded, token_name

Entries = Sequence[dict[int, Logprob] | None]


class CompletionShape(Shape):
    """With echo, the prompt's text goes before each choice, and its log-probabilities before theirs."""

    kind = chunk_kind = "text_completion"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._offsets: dict[int, Offsets] = {}  # by choice

    def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        body, index = self._body, self.index(i, completion.index)
        echo = self._prompt_text(i) if body.echo else ""
        text, token_ids, entries = completion.text, completion.token_ids, completion.logprobs
        if body.max_tokens == 0:
            text, token_ids, entries = "", [], []
        logprobs = None
        if body.logprobs is not None:
            if body.echo:
                token_ids = output.prompt_token_ids + token_ids
                entries = output.prompt_logprobs + entries
            logprobs = self._logprobs(index, token_ids, entries)
        choice = self._choice(index, echo + text, logprobs, completion)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [entry and _by_id(entry) for entry in output.prompt_logprobs]
        return choice

    def usage(self) -> dict[str, Any]:
        if self._body.max_tokens == 0:
            self._num_outputs = 0  # the one token that a step makes is not shown and not counted
        return super().usage()

    def opening(self) -> list[dict[str, Any]]:
        if not self._body.echo:
            return []
        nothing = CompletionOutput(0, "", [])
        return [
            self._choice(self.index(i, j), self._prompt_text(i), None, nothing)
            for i in range(len(self._call.jobs))
            for j in range(self._body.n)
        ]

    def piece(self, i: int, delta: StreamDelta) -> dict[str, Any] | None:
        self._num_outputs += len(delta.token_ids)
        if not (delta.text or delta.finish_reason or delta.logprobs):
            return None
        index = self.index(i, delta.index)
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs) if delta.logprobs else None
        return self._choice(index, delta.text, logprobs, delta)

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None,
                end: CompletionOutput | StreamDelta) -> dict[str, Any]:  # fmt: skip
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end.finish_reason,
                "stop_reason": end.stop_reason}  # fmt: skip

    def _prompt_text(self, i: int) -> str:
        job = self._call.jobs[i]
        return self._tokenizer.decode(job.prompt) if job.text is None else job.text

    def _logprobs(self, index: int, token_ids: list[int], entries: Entries) -> dict[str, Any]:
        if index not in self._offsets:
            self._offsets[index] = Offsets(self._tokenizer)
        offsets = self._offsets[index]
        shown = [{} if entry is None else entry for entry in entries]
        return {
            "text_offset": [offsets.next(token_id) for token_id in token_ids],
            "tokens": [
                token_name(token_id, entry.get(token_id) or Logprob(0, 0, self._tokenizer.decode([token_id])))
                for token_id, entry in zip(token_ids, shown, strict=True)
            ],
            "token_logprobs": [
                rounded(entry[token_id].logprob) if entry else None
                for token_id, entry in zip(token_ids, shown, strict=True)
            ],
            "top_logprobs": [_by_name(entry) or None for entry in shown],
        }


class Offsets:
    """Where in the text each token begins. One whose character a later token completes begins where that one does."""

    def __init__(self, tokenizer: Any):
        self._detokenizer = Detokenizer(tokenizer.decode)
        self._length = 0

    def next(self, token_id: int) -> int:
        begin = self._length
        self._length += len(self._detokenizer.add([token_id]))
        return begin


def _by_name(entry: dict[int, Logprob]) -> dict[str, float]:
    """OpenAI's form, the likeliest first. Where two tokens have one text, the likelier stands for it."""
    named: dict[str, float] = {}
    for token_id, logprob in sorted(entry.items(), key=lambda item: item[1].rank):
        named.setdefault(token_name(token_id, logprob), rounded(logprob.logprob))
    return named


def _by_id(entry: dict[int, Logprob]) -> dict[str, Any]:
    """vLLM's form of prompt_logprobs."""
    return {
        str(t): {"logprob": rounded(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
        for t, p in entry.items()
    }
