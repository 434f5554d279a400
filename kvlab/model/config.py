"""ModelConfig: the numbers that define a decoder, read from a Hugging Face `config.json`.

    config.json ------------\
                             ModelConfig.from_folder -> one frozen record, all defaults filled in
    generation_config.json -/   (end-of-sequence ids)

Qwen2, Qwen3 and Llama are one architecture that differs in a few flags: where a bias sits, whether q and k
are normalised, how the rotary frequencies are scaled. What this code would compute wrongly is refused here,
by name. No torch: sizing and planning read configurations too.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# Every rope type that layers.RotaryEmbedding computes, with the parameters it needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model of the Llama family. Sizes are in elements, positions in tokens.

    `head_dim` need not be hidden_size / num_attention_heads (Qwen3). `rope_scaling` is None, or a dict with
    "rope_type" and its parameters. `attention_bias` is the bias of q, k and v; `o_bias` that of the output
    projection. `eos_token_ids` are the ids that end a generation, `dtype` is the name of the stored type.
    `awq_group_size`: the layers' matrices are in 4 bits (model/awq.py), so many weights to a scale; None if not.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    awq_group_size: int | None = None

    @classmethod
    def from_folder(cls, folder) -> "ModelConfig":
        """Read `config.json` and, if there is one, `generation_config.json` of a model folder.

        The end-of-sequence ids come from generation_config.json first: chat models end a turn with an id that
        only that file names. Raises FileNotFoundError without config.json, ValueError for what cannot be run.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"no config.json in {str(folder)!r}: give the folder that save_pretrained wrote or that was "
                "downloaded whole (config.json, tokenizer.json and *.safetensors together)"
            )
        config = cls.from_dict(_read_json(folder / "config.json"))
        if (folder / "generation_config.json").is_file():
            eos = _eos(_read_json(folder / "generation_config.json"))
            if eos:
                config = replace(config, eos_token_ids=eos)
        return config

    @classmethod
    def from_dict(cls, d: dict) -> "ModelConfig":
        """Build from the content of a `config.json`, of transformers 5 or older.

        Raises ValueError that names the offending value and what is supported: another architecture, sliding
        windows in use, an unknown rope type, another activation, quantised weights, sizes that do not fit.
        """
        model_type = d.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"model_type {model_type!r} is not supported: use {sorted(ARCHITECTURES)}")
        architectures = d.get("architectures") or [ARCHITECTURES[model_type]]
        if ARCHITECTURES[model_type] not in architectures:
            raise ValueError(
                f"architectures {architectures} is not supported: only {ARCHITECTURES[model_type]} is"
            )
        missing = [key for key in REQUIRED if d.get(key) is None]
        if missing:
            raise ValueError(f"config.json lacks {missing}: take the file of the original checkpoint")
        for key in (*REQUIRED, "num_key_value_heads", "head_dim"):
            value = d.get(key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{key} is {value!r}: it must be a positive whole number")
        if d.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {d['hidden_act']!r} is not supported: only 'silu' (SwiGLU) is")
        _check_full_attention(d)

        heads = d["num_attention_heads"]
        rope_theta, rope_scaling = _rope(d)
        bias = model_type == "qwen2" or bool(d.get("attention_bias", False))  # Qwen2: always, without a flag
        config = cls(
            **{key: d[key] for key in REQUIRED},
            model_type=model_type,
            num_key_value_heads=d.get("num_key_value_heads") or heads,
            head_dim=d.get("head_dim") or (128 if model_type == "qwen3" else d["hidden_size"] // heads),
            rms_norm_eps=d.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(d.get("tie_word_embeddings", False)),
            attention_bias=bias,
            o_bias=bias and model_type != "qwen2",
            mlp_bias=model_type == "llama" and bool(d.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            eos_token_ids=_eos(d),
            dtype=str(d.get("dtype") or d.get("torch_dtype") or "float32").removeprefix("torch."),
            awq_group_size=_awq_group_size(d["quantization_config"]) if d.get("quantization_config") else None,
        )
        config._check_heads()
        config._check_groups()
        return config

    def _check_heads(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}: each KV head must serve an equal group of query heads (GQA)"
            )
        for key in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, key)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{key} is {value!r}: it must be a positive number; take the original config.json")
        if not all(isinstance(token_id, int) for token_id in self.eos_token_ids):
            raise ValueError(f"eos_token_id is {self.eos_token_ids!r}: it must be a token id or a list of them")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: it must be even, because RoPE rotates pairs")

    def _check_groups(self):
        """The layers' matrices must fit the 4-bit format: whole groups of inputs, outputs by eights."""
        size = self.awq_group_size
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        for value in (self.hidden_size, self.intermediate_size, q_size):
            if size is not None and value % size:
                raise ValueError(
                    f"quantization_config has group_size {size}, which does not divide {value} inputs of a layer: take "
                    "config.json and weights from the same checkpoint"
                )
        if size is not None and kv_size % 8:
            raise ValueError(f"k_proj has {kv_size} outputs: AWQ packs 8 to an int32; use the bf16 or fp16 checkpoint")


def _awq_group_size(quantization) -> int:
    """The group size of AWQ's 4-bit format "gemm". ValueError, with what to use instead, for every other."""
    instead = "use the model's AWQ checkpoint (4 bits, version 'gemm'), or the one in bf16 or fp16"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "awq":
        raise ValueError(f"quantised weights ({method!r}) are not supported: {instead}")
    bits = quantization.get("bits", quantization.get("w_bit"))  # older files say w_bit and q_group_size
    size = quantization.get("group_size", quantization.get("q_group_size"))
    version = str(quantization.get("version", "gemm")).lower()
    spared = [name for name in quantization.get("modules_to_not_convert") or [] if name != "lm_head"]
    for what, value, right in (
        ("bits", bits, bits == 4),
        ("version", quantization.get("version"), version == "gemm"),
        ("zero_point", quantization.get("zero_point"), quantization.get("zero_point", True) is True),
        ("modules_to_not_convert", spared, not spared),
        ("lm_head", quantization.get("lm_head"), not quantization.get("lm_head")),
        ("group_size", size, isinstance(size, int) and size in (16, 32, 64, 128, 256, 512, 1024)),
    ):
        if not right:
            raise ValueError(f"AWQ weights with {what} {value!r} are not supported: {instead}")
    return size


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}): fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} does not hold a JSON object: fetch the file again")
    return value


def _eos(d: dict) -> tuple[int, ...]:
    eos = d.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _check_full_attention(d: dict):
    """A window that no context can outgrow is the same as none; one that could bite is refused."""
    window = d.get("sliding_window")
    types = d.get("layer_types")
    if types is None:  # older files: the layers from max_window_layers on slide, if the flag says so
        num_sliding = max(0, d["num_hidden_layers"] - d.get("max_window_layers", 28))
        types = ["sliding_attention"] * num_sliding if d.get("use_sliding_window") and window else []
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types {unknown} is not supported: only 'full_attention' is")
    if "sliding_attention" in types and window and window < d["max_position_embeddings"]:
        raise ValueError(
            f"sliding_window {window} is in use, which is not supported: only full attention is. To run this "
            f"model up to that length, set max_position_embeddings to {window} in its config.json"
        )


def _rope(d: dict) -> tuple[float, dict | None]:
    """(rope_theta, rope_scaling). transformers 5 keeps both in `rope_parameters`, older files at the top."""
    parameters = d.get("rope_parameters") or {}
    scaling = dict(parameters or d.get("rope_scaling") or {})
    theta = parameters.get("rope_theta", d.get("rope_theta", 10000.0))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported: use one of {list(ROPE_TYPES)}. A model that only "
            "stretches its context this way runs unstretched without rope_scaling in its config.json"
        )
    partial = scaling.get("partial_rotary_factor", d.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported: only 1.0 (the whole head) is")
    if rope_type == "default":
        return theta, None
    needed = ROPE_TYPES[rope_type]
    missing = [key for key in needed if scaling.get(key) is None]
    if missing:
        raise ValueError(f"rope type {rope_type!r} lacks {missing} in its parameters {scaling}")
    return theta, {"rope_type": rope_type, **{key: scaling[key] for key in needed}}
