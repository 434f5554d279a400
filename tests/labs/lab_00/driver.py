"""Lab 00: drives the student's functions with plain values. Runs in the child process."""

from copy import deepcopy

from kvlab.primer import GPU, GPUS, Cache
from kvlab.sizing import MODELS, ModelShape

SHAPES = MODELS | {
    "TINY": ModelShape(vocab_size=10, hidden_size=5, intermediate_size=6, num_hidden_layers=3, num_attention_heads=4,
                       num_key_value_heads=1, head_dim=3),
}  # fmt: skip
GPU_TABLE = GPUS | {"TOY": GPU(peak_flops=1000.0, bandwidth=10.0, memory=10_000)}
VOCAB = 29


def rounded(value):
    """Numbers to 4 places, as plain floats, whatever the student calculates with."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(float(value), 4) + 0.0 if isinstance(value, int | float) and not isinstance(value, bool) else value


class AttendDriver:
    def __init__(self, student):
        self.student = student

    def attend(self, q, keys, values):
        given = deepcopy((q, keys, values))
        found = self.student.attend(q, keys, values)
        for name, before, after in zip(("q", "keys", "values"), given, (q, keys, values), strict=True):
            if before != after:
                return f"{name} was changed"
        return found


class NextDriver:
    """One layer, and two sequences, 0 and 1, each with keys and values of its own."""

    def __init__(self, student, q, k, v):
        self.student, self.layer = student, {"q": q, "k": k, "v": v}
        self.keys, self.values = ([], []), ([], [])

    def attend_next(self, sequence, x):
        keys, values = self.keys[sequence], self.values[sequence]
        found = self.student.attend_next(self.layer, x, keys, values)
        return {"found": rounded(found), "keys": rounded(keys), "values": rounded(values)}


class EchoModel:
    """A model that tells whether it was used well: its next token is a hash of all tokens in the cache, in order.

    num_computed: tokens that went through it. num_calls: calls of forward.
    """

    vocab_size, max_len = VOCAB, 10_000

    def __init__(self):
        self.num_computed = self.num_calls = 0

    def forward(self, tokens, cache):
        tokens = list(tokens)
        if not tokens:
            raise ValueError("forward needs at least one token")
        if not isinstance(cache, Cache):
            raise TypeError(f"forward(tokens, cache): the cache is a Cache, this one is a {type(cache).__name__}")
        if not cache.keys:
            cache.keys, cache.values = [[]], [[]]
        cache.keys[0] += [[float(token)] for token in tokens]
        cache.values[0] += [[float(token)] for token in tokens]
        self.num_computed += len(tokens)
        self.num_calls += 1
        state = 7
        for (token,) in cache.keys[0]:
            state = (state * 31 + int(token) + 11) % 1_000_003
        best = state % VOCAB
        return [-float((token - best) ** 2) for token in range(VOCAB)]


class DecodeDriver:
    def __init__(self, student):
        self.student = student

    def _run(self, function, prompt, num_tokens):
        model, given = EchoModel(), list(prompt)
        tokens = function(model, given, num_tokens)
        if given != prompt:
            return "the prompt itself was changed"
        return {"tokens": tokens, "computed": model.num_computed, "calls": model.num_calls}

    def decode_without_cache(self, prompt, num_tokens):
        return self._run(self.student.decode_without_cache, prompt, num_tokens)

    def decode_with_cache(self, prompt, num_tokens):
        return self._run(self.student.decode_with_cache, prompt, num_tokens)


class CostDriver:
    def __init__(self, student):
        self.student = student

    def step_flops(self, shape, step):
        return self.student.step_flops(SHAPES[shape], [tuple(pair) for pair in step])

    def step_bytes(self, shape, step, dtype_bytes):
        return self.student.step_bytes(SHAPES[shape], [tuple(pair) for pair in step], dtype_bytes)

    def step_bytes_by_default(self, shape, step):
        return self.student.step_bytes(SHAPES[shape], [tuple(pair) for pair in step])

    def attainable_flops(self, gpu, flop_per_byte):
        return self.student.attainable_flops(GPU_TABLE[gpu], flop_per_byte)

    def step_seconds(self, gpu, shape, step, dtype_bytes):
        return self.student.step_seconds(GPU_TABLE[gpu], SHAPES[shape], [tuple(pair) for pair in step], dtype_bytes)

    def batch_for_balance(self, gpu, shape, computed, dtype_bytes):
        return self.student.batch_for_balance(GPU_TABLE[gpu], SHAPES[shape], computed, dtype_bytes)
