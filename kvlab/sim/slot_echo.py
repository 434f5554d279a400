"""The slot-echo model: a fake model that turns every bookkeeping fault into a wrong token.

A slot of its "KV cache" stores (token, position). Its next token is a rolling hash of everything that it
reads back through the block table. There are no weights and no rounding, so thousands of random workloads
run in seconds, and a block that is freed too early, copied too late, shared when it should not be, published
before it is written or swapped to the wrong place shows up as a token that `echo_generate` does not give.

It reads the context before it writes anything, as strictly as it can: K/V that appears only during the
step in which it is read has not been promised to anybody.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvlab.sampling_params import SamplingParams, uniform
from kvlab.schedule.output import SampledTokens, SchedulerOutput

MODULUS = (1 << 61) - 1
EMPTY = (-1, -1)


def _fold(state: int, slots: Sequence[tuple[int, int]]) -> int:
    for token, position in slots:
        state = (state * 1_000_003 + token * 8191 + position + 7) % MODULUS
    return state


def _sample(state: int, params: SamplingParams, seed: int, position: int, eos: frozenset[int], vocab_size: int) -> int:
    drawn = uniform(seed, position) if params.temperature > 0 else 0.0
    token = (state + int(drawn * MODULUS)) % MODULUS % vocab_size
    if position < params.min_tokens:
        banned = eos | set(params.stop_token_ids)
        while token in banned:
            token = (token + 1) % vocab_size
    return token


def _logprobs(state: int, vocab_size: int) -> list[float]:
    """For beam search: made-up log-probabilities of all next tokens, from what was read back. From -8 to 0."""
    return [-8 * uniform(state, token) for token in range(vocab_size)]


def echo_logprobs(tokens: Sequence[int], vocab_size: int = 97) -> list[float]:
    """What the slot-echo model finds of each next token after `tokens`, without blocks: for oracles."""
    return _logprobs(_fold(0, [(token, position) for position, token in enumerate(tokens)]), vocab_size)


class EchoLogprob(NamedTuple):
    logprob: float


def echo_generate(prompt: Sequence[int], params: SamplingParams, seed: int = 0, eos_token_ids: Sequence[int] = (),
                  vocab_size: int = 97, max_num_tokens: int | None = None) -> list[int]:  # fmt: skip
    """What one continuation must be: the same hash without blocks, batches or a scheduler. The oracle."""
    eos = frozenset(eos_token_ids)
    limit = max_num_tokens or len(prompt) + params.max_tokens
    state = _fold(0, [(token, position) for position, token in enumerate(prompt)])
    output = []
    while len(prompt) + len(output) < limit:
        token = _sample(state, params, seed, len(output), eos, vocab_size)
        state = _fold(state, [(token, len(prompt) + len(output))])
        output.append(token)
        may_stop = len(output) >= params.min_tokens
        if may_stop and (token in params.stop_token_ids or (token in eos and not params.ignore_eos)):
            break
    return output


class SlotEchoRunner:
    """A runner for EngineCore and Scheduler, over lists in place of tensors."""

    def __init__(self, num_gpu_blocks: int, block_size: int, num_cpu_blocks: int = 0, vocab_size: int = 97):
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.gpu = [[EMPTY] * block_size for _ in range(num_gpu_blocks)]
        self.cpu = [[EMPTY] * block_size for _ in range(num_cpu_blocks)]

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Make the copies, then compute every scheduled token. Returns sampled tokens by request id."""
        if not output.block_ops_done:
            for kind, src, dst in output.block_ops:
                source = self.cpu if kind == "swap_in" else self.gpu
                target = self.cpu if kind == "swap_out" else self.gpu
                target[dst] = list(source[src])
            output.block_ops_done = True
        work = [(r, n, table.block_ids) for (r, n), table in zip(output.scheduled, output.block_tables, strict=True)]
        contexts = [self._read(ids, 0, r.num_computed_tokens) for r, _, ids in work]
        for request, num_tokens, ids in work:
            start = request.num_computed_tokens
            for position in range(start, start + num_tokens):
                slot = (request.all_token_ids[position], position)
                self.gpu[ids[position // self.block_size]][position % self.block_size] = slot
        sampled = SampledTokens()
        for context, (request, num_tokens, ids) in zip(contexts, work, strict=True):
            end = request.num_computed_tokens + num_tokens
            if end == request.num_tokens:
                state = _fold(0, context + self._read(ids, request.num_computed_tokens, end))
                params, position = request.sampling_params, request.num_output_tokens
                sampled[request.request_id] = [
                    _sample(state, params, request.seed + i, position, request.eos_token_ids, self.vocab_size)
                    for i in range(1 + request.num_to_fork)
                ]
                if request.group is not None:
                    found = _logprobs(state, self.vocab_size)
                    best = sorted(zip(found, range(self.vocab_size), strict=True), reverse=True)[: request.num_logprobs]
                    sampled.logprobs[request.request_id] = [{token: EchoLogprob(value) for value, token in best}]
        return sampled

    def _read(self, block_ids: list[int], start: int, stop: int) -> list[tuple[int, int]]:
        size = self.block_size
        return [self.gpu[block_ids[p // size]][p % size] for p in range(start, stop)]
