"""From a name to a model that runs: find the folder, check the weights against the configuration, build.

    "tiny" | folder | hub id --resolve_model--> folder --load_weights--> {name: tensor} --> CausalLM

Every tensor's name, shape and stored type are compared with what the configuration calls for before anything
is read, and one error lists all that is wrong: headers of safetensors files are small, weights are not.
"""

import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.model.attention import AttentionBackend
from kvlab.model.awq import PARTS
from kvlab.model.config import ModelConfig
from kvlab.model.decoder import CausalLM
from kvlab.model.hub import CheckpointError, resolve_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
STORED_TYPES = {"BF16", "F16", "F32", "F64"}
STORED_AWQ = {"qweight": {"I32"}, "qzeros": {"I32"}, "scales": {"F16"}}
# In old checkpoints, and computed here: the rotary frequencies.
HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    c = config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    linears = {
        "self_attn.q_proj": (q_size, c.hidden_size, c.attention_bias),
        "self_attn.k_proj": (kv_size, c.hidden_size, c.attention_bias),
        "self_attn.v_proj": (kv_size, c.hidden_size, c.attention_bias),
        "self_attn.o_proj": (c.hidden_size, q_size, c.o_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    norms = {"input_layernorm": c.hidden_size, "post_attention_layernorm": c.hidden_size}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    for i in range(c.num_hidden_layers):
        for name, (out_features, in_features, bias) in linears.items():
            if c.awq_group_size:
                groups, packed = in_features // c.awq_group_size, out_features // 8
                parts = zip(PARTS, ((in_features, packed), (groups, packed), (groups, out_features)), strict=True)
                shapes |= {f"model.layers.{i}.{name}.{part}": shape for part, shape in parts}
            else:
                shapes[f"model.layers.{i}.{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (out_features,)
        for name, size in norms.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (size,)
    return shapes


def load_weights(folder: str | os.PathLike, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a safetensors checkpoint, single or sharded, cast to `dtype`, on the CPU; AWQ's parts as stored.

    Raises CheckpointError when files are missing or broken, and when tensors are missing, extra, of another
    shape or of an integer or 8-bit type: all of them are named, expected against found. Harmless extras are
    skipped: stored rotary frequencies, and the head of a model whose head is its embedding.
    """
    folder = Path(folder)
    files = _safetensors_files(folder)
    shapes = expected_shapes(config)
    skipped = {"lm_head.weight"} if config.tie_word_embeddings else set()
    found: dict[str, Path] = {}
    problems = []
    for path in files:
        for name, shape, stored in _header(path):
            if name in skipped or HARMLESS.fullmatch(name):
                continue
            found[name] = path
            if name not in shapes:
                problems.append(f"extra: {name} {shape}")
            elif shape != shapes[name]:
                problems.append(f"wrong shape: {name} expected {shapes[name]}, found {shape}")
            elif stored not in (allowed := STORED_AWQ.get(name.rsplit(".", 1)[-1], STORED_TYPES)):
                problems.append(f"wrong type: {name} is {stored}, expected one of {sorted(allowed)}")
    problems += [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in found]
    if problems:
        raise CheckpointError(
            f"the weights in {str(folder)!r} do not fit its config.json: {len(problems)} problems. Take both "
            "from the same checkpoint.\n  " + "\n  ".join(problems)
        )
    weights = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if found.get(name) == path:
                    tensor = file.get_tensor(name)
                    weights[name] = tensor if name.endswith(PARTS) else tensor.to(dtype)
    return weights


def _safetensors_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {str(folder)!r}: check the path")
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{str(folder / INDEX)!r} is broken ({error!r}): fetch it again") from None
    else:
        names = [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if others and missing == [SINGLE]:
        raise CheckpointError(
            f"{str(folder)!r} holds {others}, not safetensors. Unpickling may run any code, so kvlab will "
            "not: load it in transformers, whose save_pretrained(folder) writes safetensors"
        )
    raise CheckpointError(f"{str(folder)!r} lacks {missing}: download the whole checkpoint again")


def _header(path: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, stored type) of each tensor in a file, without reading the tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]
            return [(name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices]
    except (SafetensorError, OSError) as error:
        with open(path, "rb") as file:
            pointer = file.read(30).startswith(b"version https://git-lfs")
        remedy = "it is a Git LFS pointer: run `git lfs pull`" if pointer else "download it again"
        raise CheckpointError(f"{str(path)!r} is no readable safetensors file ({error}): {remedy}") from None


def load_model(
    name: str | os.PathLike,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    backend: AttentionBackend | str = "torch",
    pack: bool = True,
    source: str | None = None,
    awq_kernel: bool = False,
    quantization: str | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """Resolve, check, load and build. `dtype`: "auto", a torch dtype, or its name.

    "auto" is bfloat16 on CUDA, and float32 on a CPU, where 16-bit matrix products are emulated unless the CPU
    has instructions for them (some 300 times slower here). Raises CheckpointError or ValueError, each with
    its remedy. awq_kernel: multiply by weights in 4 bits where the checkpoint has them (awq_linear.AWQLinear).
    quantization: "awq" refuses a checkpoint that has none; None takes what there is.
    """
    folder = resolve_model(name, source)
    device = torch.device(device)
    if dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    elif isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is unknown: use 'auto' or one of {sorted(DTYPES)}")
        dtype = DTYPES[dtype]
    try:
        config = ModelConfig.from_folder(folder)
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from None
    if quantization == "awq" and not config.awq_group_size:
        raise ValueError(
            f"quantization is 'awq', but {str(name)!r} has no quantization_config: use its AWQ checkpoint, such as "
            "'Qwen/Qwen2.5-7B-Instruct-AWQ', or leave quantization out"
        )
    weights = load_weights(folder, config, dtype)
    return CausalLM(config, weights, backend, dtype, device, pack, awq_kernel), config
