"""A model folder in a real model's exact shape, with random weights: to try what needs the shape and not the words.

    known config, fewer layers --> config.json, model-0000i-of-0000n.safetensors, index, tiny's tokenizer if asked

Each tensor is drawn from a generator of its own, seeded by (seed, name): the same folder, byte for byte, whatever the
shards, and a model of fewer layers has the first layers of one of more. Scales are such that every branch counts and
greedy decoding wanders; at the usual 0.02 a random model repeats one token, and hides every fault.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvlab.model.config import ModelConfig
from kvlab.model.loader import DTYPES, INDEX, expected_shapes

SHARD_BYTES = 2 << 30
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
ROWS = 1 << 12  # drawn at once, in fp32
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_random_model(folder: str | Path, config: dict[str, Any], *, dtype: str = "bfloat16", seed: int = 0,
                       shard_bytes: int = SHARD_BYTES, tokenizer: bool = True) -> Path:  # fmt: skip
    """Write the folder of a model that `config` (the content of a config.json) describes, with random weights.

    With AWQ_CONFIG as its quantization_config the linears are in 4 bits. dtype: all else is stored as this.
    shard_bytes: a file's tensors, at most, except where one alone is larger; no more is in memory at once.
    tokenizer: copy that of the shipped model, if the vocabulary is as large; token ids behind its own decode to
    nothing. ValueError for a configuration that kvlab cannot run, and for a folder with files in it.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: use one of {', '.join(sorted(DTYPES))}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already, and not empty: name a new folder")
    shapes = expected_shapes(ModelConfig.from_dict(config))
    shards = _shards(shapes, DTYPES[dtype].itemsize, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: random_tensor(name, shapes[name], DTYPES[dtype], seed) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * DTYPES[dtype].itemsize
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")
    if tokenizer:
        from kvlab.tiny import MODEL_DIR

        tiny = ModelConfig.from_folder(MODEL_DIR)
        if config["vocab_size"] >= tiny.vocab_size:
            for file in TOKENIZER_FILES:
                shutil.copyfile(Path(MODEL_DIR) / file, folder / file)
    return folder


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The tensor of that name: norms about 1, biases about 0, matrices scaled by the numbers that they add up.

    AWQ's parts: every number 0 to 15 alike, with zero point 8; scales that go with them.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it takes no more than 32 bits
    if name.endswith("qweight"):
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    if name.endswith("qzeros"):
        return torch.full(shape, -0x77777778, dtype=torch.int32)  # eight times 8
    if name.endswith("scales"):
        spread = (sum((q - 8) ** 2 for q in range(16)) / 16) ** 0.5
        return torch.full(shape, 1.4 / (shape[0] * AWQ_CONFIG["group_size"]) ** 0.5 / spread, dtype=torch.float16)
    tensor = torch.empty(shape, dtype=dtype)
    for start in range(0, shape[0], ROWS):
        piece = tensor[start : start + ROWS]
        noise = torch.randn(piece.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif name.endswith("bias"):
            noise = 0.3 * noise
        else:
            noise *= 0.1 if "embed" in name else 1.4 / shape[1] ** 0.5
        piece.copy_(noise)
    return tensor


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """The names, in order, cut where a file would become larger than `limit` bytes."""
    shards, size = [], 0
    for name, shape in shapes.items():
        num_bytes = torch.Size(shape).numel() * itemsize
        if not shards or size + num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards
