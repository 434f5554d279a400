"""Beam groups on the slot-echo model: what they find, that they move as a whole, and what is refused.

The oracle searches the whole vocabulary without blocks, batches or a scheduler. (That its rules are those of
`transformers` is for tests/engine/test_beam_search.py.)
"""

import random
from collections import Counter

import fuzz
import pytest
from driving import engine, request, run, snapshot, want

from kvlab.sampling_params import BeamSearchParams
from kvlab.schedule import Policies, Request, Scheduler, beam_request
from kvlab.sim import echo_logprobs

EOS = fuzz.EOS


def search(prompt, params: BeamSearchParams, eos=EOS, vocab_size=97, limit=None) -> list[tuple]:
    """(tokens, summed log-probability, score) of the best hypotheses: all continuations, ranked each step."""
    limit = limit or len(prompt) + params.max_tokens
    eos = () if params.ignore_eos else eos
    living, finished, length = [(0.0, [])], [], 0
    while True:
        length += 1
        every = [
            (total + logprob, [*tokens, token])
            for total, tokens in living
            for token, logprob in enumerate(echo_logprobs([*prompt, *tokens], vocab_size))
        ]
        every.sort(key=lambda c: -c[0])
        ends = [len(prompt) + length >= limit or tokens[-1] in eos for _, tokens in every]
        finished += [
            (tokens, total, total / length**params.length_penalty)
            for (total, tokens), end in zip(every[: params.beam_width], ends, strict=False)
            if end
        ]
        finished = sorted(finished, key=lambda f: -f[2])[: params.beam_width]
        living = [c for c, end in zip(every, ends, strict=True) if not end][: params.beam_width]
        full = len(finished) == params.beam_width
        if not living or full and (
            params.early_stopping or living[0][0] / length**params.length_penalty <= finished[-1][2]
        ):
            return finished


def found(req: Request) -> list[tuple]:
    return [(h.token_ids, h.cumulative_logprob, h.score) for h in req.group.finished]


def beams(name="b", prompt=6, width=3, max_tokens=8, **more) -> Request:
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    options = {k: more.pop(k) for k in ("length_penalty", "early_stopping", "ignore_eos") if k in more}
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options)
    return beam_request(name, tokens, params, eos_token_ids=EOS, **more)


def oracle(req: Request, **more) -> list[tuple]:
    return search(req.prompt_token_ids, req.group.params, **more)


class BeamFuzz(fuzz.Fuzz):
    """The big fuzz, with a beam group in place of about every second request."""

    def __init__(self, number: int):
        super().__init__(number)
        self.config.enable_chunked_prefill = True
        self.scheduler._chunk_limit = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens

    def _request(self) -> Request:
        plain, rng = super()._request(), self.rng
        if rng.random() < 0.5:
            return plain
        params = BeamSearchParams(
            beam_width=rng.choice([1, 2, 2, 3, 4, 6]),
            max_tokens=rng.choice([1, 5, 10, 20]),
            length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0]),
            early_stopping=rng.random() < 0.5,
            ignore_eos=rng.random() < 0.5,
        )
        prompt = plain.prompt_token_ids[: rng.choice([3, 8, 60])]
        return beam_request(plain.request_id, prompt, params, eos_token_ids=EOS, priority=plain.priority,
                            cache_salt=plain.cache_salt)  # fmt: skip

    def _limit(self, request: Request) -> int | None:
        limit = super()._limit(request)
        if request.group is None or limit is None:
            return limit
        width, config = request.group.width, self.config
        blocks = width * -(-(limit - 1) // config.block_size)
        fits = blocks < config.num_gpu_blocks_override and not self.contiguous
        return limit if fits and width <= min(config.max_num_seqs, config.max_num_batched_tokens) else None

    def _want(self, request: Request, limit: int):
        if request.group is None:
            return super()._want(request, limit)
        self.count("groups")
        self.want_found[request] = search(request.prompt_token_ids, request.group.params, EOS, self.vocab_size, limit)
        return [[]]

    want_found: dict

    def job_of(self, request: Request):
        job, index = super().job_of(request)
        return job, 0 if request.group is not None else index

    def run(self) -> Counter:
        self.want_found = {}
        counts = super().run()
        return counts

    def take(self, outputs) -> None:
        for output in outputs:
            if output.request.group is not None:
                assert output.request is output.request.group.leader and output.finish_reason
        super().take(outputs)

    def _judge_reason(self, request: Request, i: int, got, reason) -> None:
        if request.group is None:
            return super()._judge_reason(request, i, got, reason)
        self.count("searched")
        assert found(request) == self.want_found[request]
        first = request.group.finished[0]
        ends = not request.group.params.ignore_eos and first.token_ids[-1] in EOS
        assert reason == first.finish_reason == ("stop" if ends else "length")
        return None

    def _judge_cached(self, job, jobs) -> None:
        """A search may have computed (and published) what is in nobody's output."""
        assert (job.request.num_cached_tokens or 0) % self.config.block_size == 0

    def judge(self) -> None:
        for job in [*self.done, *self.jobs.values()]:
            if job.request.group is not None and job.reasons.get(0) in ("abort", "error"):
                job.want = [[0]]  # less than all came out: nothing did
        super().judge()
        assert not self.scheduler.groups
