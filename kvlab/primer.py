"""Why a KV cache: what decoding costs without one and with one, and what a GPU makes of that (lab 00; L33 3.4).

    tokens --embed--> x --q, k, v--> attend to all earlier k, v --> x' ... --> logits --> next token
                           |   '--- depend on what stands before, never on what comes after: keep them
                           '------- is needed once, for its own position

    a step = [(new tokens, tokens computed before), ...]    one pair a sequence; a decode brings 1 new token
        step_flops, step_bytes -> intensity (FLOP per byte) -> roofline: min(peak, intensity x bandwidth)

The decoder here is lists of floats, slow and small; the costs are of real models (kvlab.sizing.ModelShape).
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlab.sizing import GB, ModelShape

Vector = list[float]
Matrix = list[Vector]
Step = Sequence[tuple[int, int]]

# ---- a decoder of lists


def matvec(matrix: Matrix, x: Vector) -> Vector:
    """[rows][columns] times [columns]: [rows]."""
    return [sum(w * v for w, v in zip(row, x, strict=True)) for row in matrix]


def attend(q: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> Vector:
    """Attention of one query over all keys: softmax(q . k / sqrt(d)) as weights of the values. At least one key."""
    scores = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)) for k in keys]
    top = max(scores)  # so that exp cannot overflow
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [sum(w * v[i] for w, v in zip(weights, values, strict=True)) / total for i in range(len(values[0]))]


def attend_next(layer: dict[str, Matrix], x: Vector, keys: list[Vector], values: list[Vector]) -> Vector:
    """What one attention layer finds for the next position; appends that position's K and V (one head, L33 3.4).

    layer: matrices "q", "k", "v", each [dim][dim]. x: the position's input, [dim]. keys, values: of all positions
    before it, in order; nothing else of them is needed, and nothing but K and V of this one will be.
    """
    keys.append(matvec(layer["k"], x))
    values.append(matvec(layer["v"], x))
    return attend(matvec(layer["q"], x), keys, values)  # causal: later positions are not there yet


@dataclass
class Cache:
    """K and V of every position computed so far: keys[layer][position], values[layer][position]."""

    keys: list[list[Vector]] = field(default_factory=list)
    values: list[list[Vector]] = field(default_factory=list)

    def __len__(self) -> int:
        """Tokens in it."""
        return len(self.keys[0]) if self.keys else 0


class ToyDecoder:
    """Attention layers with random weights, one head, no MLP; K and V of a token depend on all tokens before it.

    num_projected: tokens for which q, k and v have been computed, each layer counted once: the work done.
    step: what a layer does for one position; any function with the interface of attend_next.
    """

    def __init__(self, vocab_size: int = 29, dim: int = 8, num_layers: int = 2, max_len: int = 64, seed: int = 0,
                 step: Callable[..., Vector] = attend_next):  # fmt: skip
        rng = random.Random(seed)
        draw = lambda rows: [[rng.gauss(0, 1) for _ in range(dim)] for _ in range(rows)]  # noqa: E731
        self.vocab_size, self.max_len = vocab_size, max_len
        self.embedding, self.positions = draw(vocab_size), draw(max_len)
        # Rows of one length: else the longest wins every time, and all prompts end in the same token.
        self.head = [[w / math.hypot(*row) for w in row] for row in draw(vocab_size)]
        self.layers = [{name: draw(dim) for name in ("q", "k", "v")} for _ in range(num_layers)]
        self.step, self.num_projected = step, 0

    def forward(self, tokens: Sequence[int], cache: Cache) -> Vector:
        """Logits [vocab_size] after the last of `tokens`, which follow those in `cache`; appends their K and V to it.

        ValueError for no tokens, a token that is none of the vocabulary, or more than max_len tokens in all.
        """
        if not tokens or not all(0 <= token < self.vocab_size for token in tokens):
            raise ValueError(f"tokens are {list(tokens)}: give at least one, each from 0 to {self.vocab_size - 1}")
        start = len(cache)
        if start + len(tokens) > self.max_len:
            raise ValueError(f"{start + len(tokens)} tokens: this decoder knows {self.max_len} positions")
        if not cache.keys:
            cache.keys, cache.values = [[] for _ in self.layers], [[] for _ in self.layers]
        for position, token in enumerate(tokens, start):
            x = [a + b for a, b in zip(self.embedding[token], self.positions[position], strict=True)]
            for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
                found = self.step(layer, x, keys, values)
                x = [math.tanh(a + b) for a, b in zip(x, found, strict=True)]
                self.num_projected += 1
        return matvec(self.head, x)


def decode_without_cache(model: ToyDecoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens, greedily; every step computes all tokens again, and throws K and V away."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model.forward(tokens, Cache())
        tokens.append(logits.index(max(logits)))
    return tokens[len(prompt) :]


def decode_with_cache(model: ToyDecoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The same tokens; the prompt is computed once (prefill, 预填充), then one token a step (decode, 解码)."""
    cache, new, output = Cache(), list(prompt), []
    for _ in range(num_tokens):
        logits = model.forward(new, cache)
        new = [logits.index(max(logits))]
        output += new
    return output


def num_projected(prompt: int, num_tokens: int, with_cache: bool) -> int:
    """Tokens whose q, k and v a layer computes to generate `num_tokens`: the last one's are never needed."""
    if with_cache:
        return prompt + num_tokens - 1 if num_tokens else 0
    return num_tokens * prompt + num_tokens * (num_tokens - 1) // 2


# ---- what a step costs


def flops_per_token(shape: ModelShape) -> int:
    """FLOP of one token's way through the layers' matrices: 2 a weight, whatever stands before it."""
    return 2 * shape.num_layer_weights


def flops_per_logits(shape: ModelShape) -> int:
    """FLOP of the logits of one token."""
    return 2 * shape.vocab_size * shape.hidden_size


def flops_per_pair(shape: ModelShape) -> int:
    """FLOP of one query and one key in all layers and heads: q.k, then weight times v."""
    return 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim


def step_flops(shape: ModelShape, step: Step) -> int:
    """Floating-point operations of one step, a multiply and an add being two.

    Each new token passes every matrix of the layers (2 per weight) and attends to all before it and itself (4 per
    pair and q dimension: q.k, then weights times v). Logits are computed for one token a sequence. Norms, RoPE and
    softmax are left out: far below 1% in real models.
    """
    flops = 0
    for new, computed in _checked(step):
        pairs = new * computed + new * (new + 1) // 2
        flops += flops_per_token(shape) * new + flops_per_pair(shape) * pairs + flops_per_logits(shape)
    return flops


def step_bytes(shape: ModelShape, step: Step, dtype_bytes: int = 2) -> int:
    """Bytes that one step must move: all weights once, whoever is in the batch; K and V read and written.

    The head is read once (tied or not); of the embedding, one row a token. Activations are left out: on chip, or small.
    """
    weights = shape.num_layer_weights + shape.vocab_size * shape.hidden_size
    rows = sum(new for new, _ in _checked(step)) * shape.hidden_size
    kv = sum(computed + new for new, computed in step) * shape.kv_bytes_per_token(dtype_bytes)
    return (weights + rows) * dtype_bytes + kv


def intensity(shape: ModelShape, step: Step, dtype_bytes: int = 2) -> float:
    """Arithmetic intensity (算术强度) in FLOP per byte. About B for B short decodes in bf16 (L33 3.4)."""
    return step_flops(shape, step) / step_bytes(shape, step, dtype_bytes)


# ---- what a GPU makes of it


@dataclass(frozen=True)
class GPU:
    """peak_flops: FLOP/s of dense bf16 (or fp16) matrix products. bandwidth: bytes/s. memory: bytes.

    pcie_bandwidth: bytes/s to the host, in one direction (the sheets print both together); 0 if nobody has said.
    """

    peak_flops: float
    bandwidth: float
    memory: int
    pcie_bandwidth: float = 0.0

    @property
    def balance(self) -> float:
        """FLOP per byte from which on the arithmetic units, not the memory, are the limit."""
        return self.peak_flops / self.bandwidth


# From NVIDIA's data sheets, without sparsity (the sheets of H100, H200, L4 print figures with it: twice as much).
# PCIe x16: Gen5 is 128 GB/s both ways (sheets of H100 and H200), Gen4 64 (A100, L4), Gen3 32 (T4).
GPUS: dict[str, GPU] = {
    "H200": GPU(989e12, 4.8e12, 141 * GB, 64e9),  # SXM
    "H100": GPU(989e12, 3.35e12, 80 * GB, 64e9),  # SXM
    "A100": GPU(312e12, 2.039e12, 80 * GB, 32e9),  # SXM, 80 GB
    "RTX 4090": GPU(165e12, 1.008e12, 24 * GB, 32e9),  # Ada white paper: fp16 with fp32 accumulation; PCIe Gen4
    "L4": GPU(121e12, 0.3e12, 24 * GB, 32e9),
    "T4": GPU(65e12, 0.32e12, 16 * GB, 16e9),  # fp16: it has no bf16
}


def attainable_flops(gpu: GPU, flop_per_byte: float) -> float:
    """The roofline (屋顶线): FLOP/s that work of this intensity can reach at most."""
    return min(gpu.peak_flops, flop_per_byte * gpu.bandwidth)


def step_seconds(gpu: GPU, shape: ModelShape, step: Step, dtype_bytes: int = 2) -> float:
    """The least time of a step: arithmetic and memory overlap, the slower one counts. Real steps take longer."""
    flops, moved = step_flops(shape, step), step_bytes(shape, step, dtype_bytes)
    return max(flops / gpu.peak_flops, moved / gpu.bandwidth)


def batch_for_balance(gpu: GPU, shape: ModelShape, computed: int, dtype_bytes: int = 2) -> int | None:
    """The fewest decodes, each with `computed` tokens before it, whose step reaches the GPU's balance; None: no batch.

    B decodes do B x f FLOP and move W + B x b bytes: the weights' W is shared, the b of each one's K/V is not. So the
    intensity never passes f / b, however large B is (L33 3.4).
    """
    one, two = ([(1, computed)] * n for n in (1, 2))
    flops = step_flops(shape, one)
    own = step_bytes(shape, two, dtype_bytes) - step_bytes(shape, one, dtype_bytes)
    shared = step_bytes(shape, one, dtype_bytes) - own
    spare = flops - gpu.balance * own  # FLOP that each decode brings beyond what its own bytes need
    return math.ceil(gpu.balance * shared / spare) if spare > 0 else None


def _checked(step: Step) -> Step:
    if not step:
        raise ValueError("the step is empty: give (new tokens, tokens computed before) of each sequence")
    for new, computed in step:
        if new < 1 or computed < 0:
            raise ValueError(f"({new}, {computed}) in the step: at least 1 new token, and 0 or more computed before")
    return step
