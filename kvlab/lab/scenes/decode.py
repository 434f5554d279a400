"""One token by the real engine, in two ways (lab 00): computed anew from the whole text, or decoded behind a cache.

    Meter().times((32, 64)) -> {32: (anew, decoded), ...}     seconds of processor time, on one thread
    Meter().tokens(20, 40)  -> Sent(anew, decoded, same)      tokens that went through the model, and: the same text?

Needs torch and the model that ships with kvlab; available() says whether they are there.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

from kvlab.sampling_params import SamplingParams


def available() -> bool:
    return all(find_spec(name) is not None for name in ("torch", "transformers"))


class Sent(NamedTuple):
    """Tokens that went through the model without reuse and with a cache; same: whether both made the same tokens."""

    anew: int
    decoded: int
    same: bool


class Meter:
    """An engine with the shipped model and no prefix cache, and a clock. Prompts are the glossary's tokens."""

    def __init__(self) -> None:
        from kvlab import LLM
        from kvlab.tiny import load_glossary

        self.llm = LLM("tiny", dtype="float32", enable_prefix_caching=False, max_num_batched_tokens=2048,
                       num_gpu_blocks_override=100)  # fmt: skip
        entries = [entry["question"] + " " + entry["answer"] for entry in load_glossary()]
        self.words = [token for text in entries for token in self.llm.tokenizer.encode(text)]

    def times(self, lengths: Sequence[int], repeats: int = 3) -> dict[int, tuple[float, float]]:
        """By number of tokens before: seconds of one token, computed anew and decoded (the mean of 32 decodes)."""
        found = {}
        with _one_thread():
            self._generate(self.words[:32], 4)  # the first call pays for things that no later one does
            for n in lengths:
                anew = min(self._seconds(n, 1) for _ in range(repeats))
                found[n] = anew, (min(self._seconds(n, 33) for _ in range(repeats)) - anew) / 32
        return found

    def tokens(self, num_prompt: int, num_tokens: int) -> Sent:
        """Send a prompt and let `num_tokens` be made, once in one call, and once anew for each token."""
        text, counts = self.words[:num_prompt], [self._num_computed()]
        kept = self._generate(text, num_tokens)
        counts.append(self._num_computed())
        for _ in range(num_tokens):
            text = text + self._generate(text, 1)
        counts.append(self._num_computed())
        return Sent(counts[2] - counts[1], counts[1] - counts[0], text[num_prompt:] == kept)

    def _num_computed(self) -> int:
        return self.llm.engine.scheduler.stats.num_scheduled_tokens

    def _generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return list(self.llm.generate([prompt], params)[0].outputs[0].token_ids)

    def _seconds(self, num_prompt: int, num_tokens: int) -> float:
        began = time.process_time()
        self._generate(self.words[:num_prompt], num_tokens)
        return time.process_time() - began


@contextmanager
def _one_thread() -> Iterator[None]:
    """So that processor time is the time of one core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
