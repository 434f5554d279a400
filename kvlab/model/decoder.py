"""CausalLM: token ids in, logits out, with K and V kept in pages. Qwen2, Qwen3 and Llama by configuration.

    token_ids -> embed_tokens -> x
    each layer:  x += o_proj(attention(rope(qkv_proj(norm(x)))))       K and V are written to the KVCache, then read
                 x += down_proj(swiglu(gate_up_proj(norm(x))))
    rows that need logits -> norm -> lm_head -> logits

Only attention knows that tokens belong to sequences; all else works on the flat [T, hidden] of the step. The products
are here; what stands between them is `ops` (PyTorch's operations, fused kernels or a student's); `backend` attends.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.model.attention import AttentionBackend
from kvlab.model.awq import PARTS
from kvlab.model.awq_linear import AWQLinear
from kvlab.model.backends import get_attention_backend
from kvlab.model.batch import FlatBatch
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache
from kvlab.model.layers import Linear, RotaryEmbedding
from kvlab.model.ops import Ops, Step, ops_beside


@dataclass
class DecoderLayer:
    """One layer's weights. q, k and v are one matrix, gate and up another: fewer and larger products."""

    input_layernorm: Tensor  # [hidden]
    qkv_proj: Linear | AWQLinear  # hidden -> (H + 2 Hkv) * D
    qk_norm: Tensor | None  # [H + Hkv, D]: q_norm for each query head, k_norm for each KV head (Qwen3)
    o_proj: Linear | AWQLinear  # H * D -> hidden
    post_attention_layernorm: Tensor  # [hidden]
    gate_up_proj: Linear | AWQLinear  # hidden -> 2 * intermediate
    down_proj: Linear | AWQLinear  # intermediate -> hidden


class CausalLM:
    """A decoder-only language model over a paged KV cache.

    `weights`: tensors by their Hugging Face names, as `loader.load_weights` returns them. The dict is emptied
    on the way, so that a large model is never in memory twice. `backend` is an AttentionBackend or its name.
    `pack` allows packed linear layers on a CPU (see layers.Linear), `awq_kernel` products with weights in 4 bits,
    where the weights are (see awq_linear.AWQLinear).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        backend: AttentionBackend | str = "torch",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pack: bool = True,
        awq_kernel: bool = False,
    ):
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.use(get_attention_backend(backend) if isinstance(backend, str) else backend)

        def take(name: str) -> Tensor:
            # A copy even if nothing changes: safetensors gives views of the mapped file, and one such view
            # would keep the whole file mapped.
            return weights.pop(name).to(self.device, dtype, copy=True)

        def awq_linear(prefix: str, names: tuple[str, ...], bias: bool) -> AWQLinear:
            # Every part has the outputs along its last dimension, where whole int32 of 8 outputs lie side by side.
            parts = (
                torch.cat([weights.pop(f"{prefix}.{name}.{part}").to(self.device) for name in names], -1)
                for part in PARTS
            )
            biases = torch.cat([take(f"{prefix}.{name}.bias") for name in names]) if bias else None
            return AWQLinear(*parts, biases, dtype=dtype, kernel=awq_kernel, pack=pack)

        def linear(prefix: str, *names: str, bias: bool) -> Linear | AWQLinear:
            if config.awq_group_size:
                return awq_linear(prefix, names, bias)
            weight, *rest = (
                torch.cat([take(f"{prefix}.{name}.{kind}") for name in names])
                for kind in (("weight", "bias") if bias else ("weight",))
            )
            return Linear(weight, *rest, pack=pack)

        def qk_norm(prefix: str) -> Tensor:
            q_norm = take(f"{prefix}.q_norm.weight").expand(config.num_attention_heads, -1)
            k_norm = take(f"{prefix}.k_norm.weight").expand(config.num_key_value_heads, -1)
            return torch.cat((q_norm, k_norm))

        def layer(p: str) -> DecoderLayer:
            return DecoderLayer(
                input_layernorm=take(f"{p}.input_layernorm.weight"),
                qkv_proj=linear(f"{p}.self_attn", "q_proj", "k_proj", "v_proj", bias=config.attention_bias),
                qk_norm=qk_norm(f"{p}.self_attn") if config.qk_norm else None,
                o_proj=linear(f"{p}.self_attn", "o_proj", bias=config.o_bias),
                post_attention_layernorm=take(f"{p}.post_attention_layernorm.weight"),
                gate_up_proj=linear(f"{p}.mlp", "gate_proj", "up_proj", bias=config.mlp_bias),
                down_proj=linear(f"{p}.mlp", "down_proj", bias=config.mlp_bias),
            )

        self.layers = [layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self.embed_tokens = take("model.embed_tokens.weight")  # [vocab, hidden]
        self.norm = take("model.norm.weight")
        # A tied head multiplies by the matrix that the embedding looks rows up in. Packed, it is a second
        # copy all the same: rows cannot be looked up in the packed layout.
        head = self.embed_tokens if config.tie_word_embeddings else take("lm_head.weight")
        self.lm_head = Linear(head, pack=pack)
        self.rotary = RotaryEmbedding(config, dtype, self.device)

    def use(self, backend: AttentionBackend, ops: Ops | None = None) -> None:
        """Attend by `backend`, and compute between the products by `ops`; None: by those that go with the backend."""
        self.backend = backend
        self.ops = ops_beside(backend, self.dtype) if ops is None else ops

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Compile what the linear layers can need in steps of up to so many tokens."""
        layer = self.layers[0]  # all have the same shapes
        for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
            if isinstance(linear, AWQLinear):
                linear.warm_up(max_num_batched_tokens)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv_cache: KVCache) -> Tensor:
        """Logits [R, vocab] of the rows `batch.logits_indices`: float32, or float64 if the model is.

        Writes the K and V of all T tokens to `kv_cache`, then reads each sequence's context from it.
        """
        c, ops, eps = self.config, self.ops, self.config.rms_norm_eps
        num_qk_heads = c.num_attention_heads + c.num_key_value_heads
        step = Step(batch, kv_cache, self.rotary, self.backend, self.backend.plan(batch, kv_cache))
        x = F.embedding(batch.token_ids, self.embed_tokens)  # [T, hidden]
        y = None  # [T, hidden], still to be added to x: that is done where the sum is normalised

        for i, layer in enumerate(self.layers):
            x, h = ops.add_norm(x, y, layer.input_layernorm, eps)
            heads = layer.qkv_proj(h).view(len(h), -1, c.head_dim)  # [T, H + 2 Hkv, D]
            qk, v = heads.split((num_qk_heads, c.num_key_value_heads), dim=1)
            if layer.qk_norm is not None:
                qk = ops.rms_norm(qk, layer.qk_norm, eps)
            q = ops.rope_and_write(qk, v, i, step)
            y = layer.o_proj(self.backend.attend(q, i, step.metadata).flatten(1))

            x, h = ops.add_norm(x, y, layer.post_attention_layernorm, eps)
            y = layer.down_proj(ops.swiglu(layer.gate_up_proj(h)))

        rows = batch.logits_indices
        _, h = ops.add_norm(x[rows], y[rows], self.norm, eps)
        logits = self.lm_head(h)  # [R, vocab]
        return logits if logits.dtype == torch.float64 else logits.float()
