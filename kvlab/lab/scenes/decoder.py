"""Scenes of lab 12: the model we ship, run by functions that can be exchanged one by one, and twelve faults.

    TinyRun(layer=..., flat_batch=...)     .step({name: tokens}) -> logits; .answer(question); .trace
    FAULTS                                 what is wrong, and the functions that have it wrong
    reference(tokens)                      logits of the same model by transformers
    spread(trace, other)                   the largest difference of each result, in the order of computation

Blocks are handed out in scattered order, and what nobody has written is NaN. Slower than the engine, and open.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.engine.tokenizer import Tokenizer
from kvlab.model import batch as batches
from kvlab.model import decoder_steps as ours
from kvlab.model.config import ModelConfig
from kvlab.model.layers import rms_norm
from kvlab.model.loader import load_weights, resolve_model

Trace = list[tuple[str, Tensor]]
BLOCK_SIZE, NUM_BLOCKS = 16, 60


@cache
def tiny() -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    """Configuration, weights in fp32 by their Hugging Face names, and tokenizer of the model we ship."""
    folder = resolve_model("tiny")
    config = ModelConfig.from_folder(folder)
    return config, load_weights(folder, config, torch.float32), Tokenizer(folder)


@cache
def layer_weights(index: int) -> dict[str, Tensor]:
    """One layer's weights, by the end of their names: "q_proj.weight", "input_layernorm.weight"."""
    prefix = f"model.layers.{index}."
    found = ((name.removeprefix(prefix), x) for name, x in tiny()[1].items() if name.startswith(prefix))
    return {name.removeprefix("self_attn.").removeprefix("mlp."): x for name, x in found}


def tokens_of(question: str) -> list[int]:
    """The question as a chat, as token ids."""
    return tiny()[2].apply_chat_template([{"role": "user", "content": question}])


def text_of(token_ids: Sequence[int]) -> str:
    return tiny()[2].decode(list(token_ids))


@cache
def reference_model() -> Any:
    """The model we ship, in transformers, in fp32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).eval()


class TinyRun:
    """Sequences under way. layer: as decoder_steps.decoder_layer; norm: for the last norm; flat_batch: the engine's."""

    def __init__(self, layer: Callable[..., Tensor] = ours.decoder_layer, norm: Callable[..., Tensor] = rms_norm,
                 flat_batch: Callable[..., Any] = batches.flat_batch, watch: bool = False):  # fmt: skip
        self.config, self.weights, _ = tiny()
        self.layer, self.norm, self.flat_batch = layer, norm, flat_batch
        c = self.config
        shape = 2, NUM_BLOCKS, BLOCK_SIZE, c.num_key_value_heads, c.head_dim
        self.kv = [torch.full(shape, torch.nan) for _ in range(c.num_hidden_layers)]
        self.free = [(7 * i + 3) % (NUM_BLOCKS - 1) + 1 for i in range(NUM_BLOCKS - 1)]
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.watched = watch
        self.trace: Trace = []  # of the last step

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Compute each sequence's next tokens, all in one flat batch: logits [vocab] after the last of each."""
        seqs = []
        for name, tokens in chunks.items():
            start, table = self.lengths.get(name, 0), self.tables.setdefault(name, [])
            self.lengths[name] = start + len(tokens)
            while len(table) * BLOCK_SIZE < self.lengths[name]:
                table.append(self.free.pop(0))
            seqs.append((list(tokens), start, list(table), True))
        batch = self.flat_batch(seqs, BLOCK_SIZE)
        embedding = self.weights["model.embed_tokens.weight"]
        x, self.trace = embedding[batch.token_ids], []
        self._see("embedding", x)
        for index, kv in enumerate(self.kv):
            keep = {"watch": partial(self._see_in, index)} if self.watched else {}
            x = self.layer(x, layer_weights(index), batch, kv, self.config, **keep)
        x = self.norm(x[batch.logits_indices], self.weights["model.norm.weight"], self.config.rms_norm_eps)
        self._see("last norm", x)
        logits = x @ embedding.T
        self._see("logits", logits)
        return dict(zip(chunks, logits, strict=True))

    def _see(self, name: str, x: Tensor) -> None:
        if self.watched:
            self.trace.append((name, x.clone()))

    def _see_in(self, index: int, name: str, x: Tensor) -> None:
        self._see(f"layer {index} {name}", x)

    def continue_greedily(self, name: str, tokens: Sequence[int], most: int = 40) -> list[int]:
        """The next tokens of `name`, the most likely one each time, up to the end of the answer."""
        logits, found = self.step({name: tokens})[name], []
        while len(found) < most and int(logits.argmax()) not in self.config.eos_token_ids:
            found.append(int(logits.argmax()))
            logits = self.step({name: found[-1:]})[name]
        return found

    def answer(self, question: str, most: int = 40) -> list[int]:
        """The answer to a question, as token ids."""
        return self.continue_greedily(question, tokens_of(question), most)


def spread(trace: Trace, other: Trace) -> list[tuple[str, float]]:
    """(name, largest difference) of each result of two runs of the same tokens. NaN beside a number is infinite."""
    found = []
    for (name, x), (_, y) in zip(trace, other, strict=True):
        found.append((name, float((x - y).abs().nan_to_num(torch.inf).max())))
    return found


# ---- faults


def _attend(q: Tensor, kv: Tensor, block_table: Sequence[int], seq_len: int, *, scale: float | None = None,
            by_remainder: bool = False, sees: Callable[[int, int], Tensor] | None = None) -> Tensor:  # fmt: skip
    """As decoder_steps.attend, with a knob for each fault. sees(n, seq_len): the last position of each row."""
    n, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.shape[2:4]
    positions = torch.arange(seq_len)
    k, v = kv[:, torch.as_tensor(block_table)[positions // block_size], positions % block_size]
    heads = torch.arange(num_heads)
    of_head = heads % num_kv_heads if by_remainder else heads // (num_heads // num_kv_heads)
    last = seq_len - n + torch.arange(n) if sees is None else sees(n, seq_len)
    scores = torch.einsum("nhd,lhd->hnl", q, k[:, of_head]) * (head_dim**-0.5 if scale is None else scale)
    weights = scores.masked_fill(positions > last[:, None], -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hnl,lhd->nhd", weights, v[:, of_head])


def _neighbours(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = (positions[:, None].float() * theta ** (-torch.arange(half).float() / half))[:, None]
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _in_bf16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    narrow = x.bfloat16()
    return (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


FAULTS: dict[str, tuple[str, dict[str, Callable[..., Tensor]]]] = {
    "pairs": ("RoPE pairs neighbours, 2i and 2i + 1", {"turn": _neighbours}),
    "theta": ("RoPE's theta is 1,000,000, not 10,000", {"turn": lambda x, at, theta: ours.rope(x, at, 1e6)}),
    "shift": ("every position is 1,000 too large", {"turn": lambda x, at, theta: ours.rope(x, at + 1000, theta)}),
    "heads": ("query head h reads KV head h % Hkv", {"attention": partial(_attend, by_remainder=True)}),
    "scale": ("scores are not divided by sqrt(D)", {"attention": partial(_attend, scale=1.0)}),
    "offset": ("row i of a chunk sees positions 0 to i",
               {"attention": partial(_attend, sees=lambda n, seq_len: torch.arange(n))}),
    "mask": ("no causal mask: every row sees all",
             {"attention": partial(_attend, sees=lambda n, seq_len: torch.full((n,), seq_len))}),
    "itself": ("no row sees its own position",
               {"attention": partial(_attend, sees=lambda n, seq_len: seq_len - n - 1 + torch.arange(n))}),
    "bf16": ("RMSNorm computes in bf16", {"norm": _in_bf16}),
    "eps": ("eps is 1e-5, not 1e-6", {"norm": lambda x, w, eps: rms_norm(x, w, 1e-5)}),
    "mean": ("LayerNorm: the mean is subtracted first",
             {"norm": lambda x, w, eps: F.layer_norm(x, x.shape[-1:], w, eps=eps)}),
    "gelu": ("GELU in the place of SiLU", {"activation": F.gelu}),
}  # fmt: skip


def with_fault(name: str, watch: bool = False) -> TinyRun:
    """A run of the model with one fault; "" is none."""
    parts = FAULTS[name][1] if name else {}
    last = {"norm": parts["norm"]} if "norm" in parts else {}
    return TinyRun(partial(ours.decoder_layer, **parts), watch=watch, **last)


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """The index of the first token at which two answers differ; None if they are the same."""
    if list(found) == list(expected):
        return None
    shared = min(len(found), len(expected))
    return next((i for i in range(shared) if found[i] != expected[i]), shared)
