"""From a request's body to jobs: text to token ids, and what cannot fit refused at once.

It runs on one thread of its own beside the event loop: a long text takes a while, and the tokenizer of a model is
not made for several threads that write. What it reads of the LLM never changes.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvlab.serve.call import Job
from kvlab.serve.errors import APIError, bad_request
from kvlab.serve.protocol import Body, ChatBody, CompletionBody


class Prompts:
    """Makes jobs. Errors are APIErrors; none tells where the model lies on the disk."""

    def __init__(self, llm: Any):
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._max_model_len = llm.config.max_model_len
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvlab-tokenizer")

    def warm_up(self) -> None:
        """Load the tokenizer now, so that the first request need not wait for it."""
        if self._tokenizer.exists:
            self._tokenizer.encode("")
            self._tokenizer.longest_token  # noqa: B018

    def jobs(self, body: Body) -> list[Job]:
        """One job for each prompt. APIError 400 if one is malformed or too long."""
        try:
            return self._of_chat(body) if isinstance(body, ChatBody) else self._of_completion(body)
        except ValueError as error:  # a token id that is none, text that is not Unicode
            raise bad_request(str(error), "messages" if isinstance(body, ChatBody) else "prompt") from None

    def _of_completion(self, body: CompletionBody) -> list[Job]:
        jobs = []
        for i, prompt in enumerate(body.prompts):
            where = f"prompt {i}: " if len(body.prompts) > 1 else ""
            text = prompt if isinstance(prompt, str) else None
            if text is not None:
                self._needs_tokenizer("text", "prompt")
                self._refuse_unread(len(text), where, "prompt")
            job = self._job(body, self._llm.token_ids_of(prompt, where), where, "prompt")
            jobs.append(replace(job, text=text))
        return jobs

    def _of_chat(self, body: ChatBody) -> list[Job]:
        self._needs_tokenizer("chats", "messages")
        if not self._tokenizer.has_chat_template:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        messages = [message.plain() for message in body.messages]
        self._refuse_unread(sum(len(message["content"]) for message in messages), "", "messages")
        try:
            token_ids = self._tokenizer.apply_chat_template(messages)
        except ValueError:
            raise
        except Exception as error:  # a template refuses by raising what it likes
            raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from None
        return [self._job(body, token_ids, "", "messages")]

    def _job(self, body: Body, token_ids: list[int], where: str, param: str) -> Job:
        length, most = len(token_ids), self._max_model_len
        if not length:
            raise bad_request(f"{where}the prompt is empty; give at least one token of text", param)
        if length >= most:
            raise self._too_long(f"{where}the prompt has {length} tokens", param)
        max_tokens = body.asked_max_tokens
        if max_tokens is None:
            default = body.default_max_tokens
            max_tokens = default and min(default, most - length)
        elif length + max_tokens > most:
            raise self._too_long(f"{where}{length} prompt tokens and max_tokens {max_tokens} are together "
                                 f"{length + max_tokens} tokens", param)  # fmt: skip
        params = body.sampling_params(max_tokens)
        return Job(token_ids, params, body.priority, body.cache_salt)

    def _needs_tokenizer(self, what: str, param: str) -> None:
        if not self._tokenizer.exists:
            raise bad_request(f"this model has no tokenizer for {what}; give /v1/completions token ids", param)

    def _refuse_unread(self, length: int, where: str, param: str) -> None:
        """Refuse a text that has too many tokens however it is cut, without taking the time to cut it."""
        least = length // self._tokenizer.longest_token
        if least >= self._max_model_len:
            raise self._too_long(f"{where}{length} characters are at least {least} tokens", param)

    def _too_long(self, what: str, param: str) -> APIError:
        return bad_request(f"{what}, and this model's context holds {self._max_model_len}, outputs included; "
                           f"shorten the prompt or lower max_tokens", param, "context_length_exceeded")  # fmt: skip
