"""What the answers of completions and chats have in common: id, time, model, usage, how a token is named."""

import time
from typing import Any

from kvlab.engine.logits import Logprob
from kvlab.engine.outputs import RequestOutput, StreamDelta
from kvlab.serve.call import Call
from kvlab.serve.protocol import Body


class Shape:
    """Writes one call's answer. kind: the "object" of a whole answer; chunk_kind: of a piece of a streamed one."""

    kind = chunk_kind = ""

    def __init__(self, body: Body, call: Call, model: str, tokenizer: Any):
        self._body, self._call, self._model, self._tokenizer = body, call, model, tokenizer
        self._created = int(time.time())
        self._num_prompt_tokens = sum(len(job.prompt) for job in call.jobs)
        self._num_cached, self._num_outputs = 0, 0

    # ---- for subclasses to fill

    def choice(self, i: int, output: RequestOutput, completion: Any) -> dict[str, Any]:
        """A finished continuation of prompt i."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """Choices that a stream begins with, before anything has been computed."""
        return []

    def piece(self, i: int, delta: StreamDelta) -> dict[str, Any] | None:
        """What a step added, as a choice of a chunk; None if it is nothing to see yet."""
        raise NotImplementedError

    # ---- the frame around choices

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        for output in outputs:
            self.count(output)
        choices = [self.choice(i, output, c) for i, output in enumerate(outputs) for c in output.outputs]
        return self._frame(self.kind, choices) | {"usage": self.usage()}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """One event of a stream."""
        frame = self._frame(self.chunk_kind, [choice])
        if self._body.continuous_usage:
            frame["usage"] = self.usage()
        elif self._body.include_usage:
            frame["usage"] = None  # as OpenAI does in all but the last
        return frame

    def closing(self) -> dict[str, Any] | None:
        """The event after the last choice: usage alone, if it was asked for."""
        if self._body.include_usage:
            return self._frame(self.chunk_kind, []) | {"usage": self.usage()}
        return None

    def count(self, output: RequestOutput) -> None:
        """Take a finished prompt's figures in."""
        self._num_cached += output.usage.cached_tokens
        if not self._call.stream:  # a stream has counted each delta
            self._num_outputs += output.usage.completion_tokens

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_outputs,
            "total_tokens": self._num_prompt_tokens + self._num_outputs,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def index(self, i: int, index: int) -> int:
        """The number of continuation `index` of prompt i among all choices."""
        return i * self._body.n + index

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._call.name, "object": kind, "created": self._created, "model": self._model,
                "choices": choices}  # fmt: skip


def token_name(token_id: int, logprob: Logprob) -> str:
    """The token's text. One that is no whole character has none: "token_id:17", as vLLM writes it."""
    text = logprob.decoded_token or ""
    return f"token_id:{token_id}" if "\ufffd" in text else text


def rounded(logprob: float) -> float:
    """JSON has no infinity; a token that cannot be has OpenAI's -9999."""
    return max(logprob, -9999.0)
