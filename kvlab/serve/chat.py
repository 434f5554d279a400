"""/v1/chat/completions in OpenAI's form: a conversation in, the assistant's messages out."""

from typing import Any

from kvlab.engine.logits import Logprob
from kvlab.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from kvlab.serve.shape import Shape, rounded, token_name


class ChatShape(Shape):
    """A stream opens with the role of each choice."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text}
        return self._choice(self.index(i, completion.index), "message", message, completion)

    def opening(self) -> list[dict[str, Any]]:
        nothing = CompletionOutput(0, "", [])
        return [
            self._choice(index, "delta", {"role": "assistant", "content": ""}, nothing)
            for index in range(self._body.n)
        ]

    def piece(self, i: int, delta: StreamDelta) -> dict[str, Any] | None:
        self._num_outputs += len(delta.token_ids)
        if not (delta.text or delta.finish_reason or delta.logprobs):
            return None
        content = {"content": delta.text} if delta.text else {}
        return self._choice(self.index(i, delta.index), "delta", content, delta)

    def _choice(self, index: int, key: str, content: dict[str, str],
                part: CompletionOutput | StreamDelta) -> dict[str, Any]:  # fmt: skip
        logprobs = None
        if self._body.logprobs and part.logprobs:
            entries = zip(part.token_ids, part.logprobs, strict=True)
            logprobs = {"content": [self._entry(t, entry) for t, entry in entries], "refusal": None}
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason}  # fmt: skip

    def _entry(self, token_id: int, entry: dict[int, Logprob]) -> dict[str, Any]:
        """The token, and as many of the likeliest as were asked for (the token itself may not be among them)."""
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        top = [_named(t, logprob) for t, logprob in ranked[: self._body.top_logprobs or 0]]
        return _named(token_id, entry[token_id]) | {"top_logprobs": top}


def _named(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    # A part of a character decodes to U+FFFD, whose bytes are not the token's: OpenAI allows null for that.
    in_bytes = None if "\ufffd" in text else list(text.encode())
    return {"token": token_name(token_id, logprob), "logprob": rounded(logprob.logprob), "bytes": in_bytes}
