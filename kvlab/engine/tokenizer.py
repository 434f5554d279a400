"""Text to token ids and back. The work is done by `transformers`' tokenizer, loaded when first needed."""

from functools import cached_property
from pathlib import Path


class Tokenizer:
    """The tokenizer of a model folder. A folder without one still serves token ids, with empty texts."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def exists(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))

    @cached_property
    def _tokenizer(self):
        if not self.exists:
            return None
        from transformers import AutoTokenizer  # seconds to import; token ids in, token ids out do without it

        try:
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # whatever it stumbles over in a broken file
            raise ValueError(
                f"the tokenizer in {str(self.folder)!r} cannot be read ({type(error).__name__}: {error}); fetch it anew"
            ) from error

    def _needed(self):
        if self._tokenizer is None:
            raise ValueError(f"{str(self.folder)!r} has no tokenizer (tokenizer.json): give prompts as token ids")
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least len(text) / longest_token tokens."""
        return max(map(len, self._needed().get_vocab()))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; some models want a special token before it."""
        return self._needed().encode(_checked(text), add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def apply_chat_template(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        if self._needed().chat_template is None:
            raise ValueError(f"the tokenizer in {str(self.folder)!r} has no chat template: use generate with text")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
                raise ValueError(f"message {message!r}: each is {{'role': 'user', 'content': 'text'}}")
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(_checked(text), add_special_tokens=False)


def _checked(text: str) -> str:
    """`text`, if it can be written as UTF-8; a lone surrogate (from bytes that were no text) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text holds {text[error.start]!r}, which is no character: give valid Unicode") from None
    return text

