"""Weights in 4 bits as AWQ stores them (Lin et al. 2023): W4A16, activations stay in 16 bits (PAV 3.1, 量化).

    weight[n, k] = (q[k, n] - zero[k // group, n]) * scale[k // group, n]      q and zero: 0 to 15, 4 bits each

    x.qweight   int32  [in, out / 8]            eight columns in one int32
    x.qzeros    int32  [in / group, out / 8]    likewise
    x.scales    fp16   [in / group, out]
    x.bias      fp16   [out], where the layer has one

The matrices lie transposed, [in, out], and eight neighbours in `out` share an int32, not in their order: nibble i holds
column AWQ_ORDER[i]. (Nibbles i and i + 4, the same place in the two halves of an int32, are neighbours: two at a time
they become two 16-bit numbers.) Embedding, norms and the head stay in 16 bits.

What AWQ itself does comes before. It looks for a scale of each input channel, by the activations of a sample, that
makes rounding harmless where it matters, and folds it into the layer before. A checkpoint shows none of that, and
`quantise_weight` here does none of it: it rounds to the nearest, to make folders to test and play with.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = ("qweight", "qzeros", "scales")
LINEARS = tuple(f".{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def pack(numbers: Tensor) -> Tensor:
    """Numbers 0 to 15, integers [R, C] with C a multiple of 8 -> int32 [R, C / 8]."""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32, device=numbers.device)
    for nibble, column in enumerate(AWQ_ORDER):
        words |= numbers[:, column::8].int() << (4 * nibble)
    return words


def unpack(words: Tensor) -> Tensor:
    """int32 [R, C / 8] -> uint8 [R, C], 0 to 15."""
    numbers = torch.empty(len(words), words.shape[1] * 8, dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(AWQ_ORDER):
        numbers[:, column::8] = (words >> (4 * nibble)) & 15
    return numbers


def unpack_reference(words: Tensor) -> list[list[int]]:
    """`unpack`, one number after the other."""
    rows = []
    for row in words.tolist():
        numbers = []
        for word in row:
            digits = f"{word % 2**32:08x}"[::-1]  # nibble 0, the lowest, first
            numbers += [int(digits[AWQ_ORDER.index(column)], 16) for column in range(8)]
        rows.append(numbers)
    return rows


def quantise_weight(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [out, in] -> (qweight, qzeros, scales), rounded to the nearest: this is not AWQ's search.

    Each group's range, widened to hold 0, becomes 15 steps. ValueError if the sizes do not fit the format.
    """
    out_features, in_features = weight.shape
    if group_size < 1 or in_features % group_size or out_features % 8:
        raise ValueError(
            f"a weight of {out_features} x {in_features} does not fit groups of {group_size}: in_features must be a "
            "multiple of the group, out_features of 8"
        )
    groups = weight.float().T.view(-1, group_size, out_features)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    # At least fp16's smallest, so that nothing is divided by 0; rounded to fp16 first, as it will be read.
    scales = ((high - low) / 15).clamp(min=2.0**-24).half()
    step = scales.float()
    zeros = (-low / step).round().clamp(0, 15)
    numbers = (groups / step[:, None] + zeros[:, None]).round().clamp(0, 15)
    return pack(numbers.view(in_features, -1)), pack(zeros), scales


def dequantise_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in dtype: multiplied in fp32 at least, where it is exact, then rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    (groups, out_features), in_features = scales.shape, len(qweight)
    numbers = unpack(qweight).view(groups, -1, out_features).to(wide)
    numbers -= unpack(qzeros).to(wide)[:, None]
    numbers *= scales.to(wide)[:, None]
    return numbers.view(in_features, out_features).T.to(dtype).contiguous()


def quantise_checkpoint(source: str | os.PathLike, target: str | os.PathLike, group_size: int = 128) -> None:
    """Write an AWQ folder from a plain one with one safetensors file, rounded by `quantise_weight`, the rest in fp16.

    target must not exist yet. ValueError where the sizes do not fit.
    """

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, tensor in tensors.items():
            prefix, kind = name.rsplit(".", 1)
            if prefix.endswith(LINEARS) and kind == "weight":
                parts = quantise_weight(tensor, group_size)
                made |= {f"{prefix}.{part}": value for part, value in zip(PARTS, parts, strict=True)}
            else:
                made[name] = tensor.half()
        return made

    quantization = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    _rewrite(source, target, change, quantization)


def dequantise_checkpoint(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Write an AWQ folder's weights out in fp32, as a plain folder: exactly what the 4 bits stand for.

    For programs that do not read AWQ, and to compare with. One safetensors file; target must not exist yet.
    """

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, tensor in tensors.items():
            prefix, kind = name.rsplit(".", 1)
            if kind == "qweight":
                parts = (tensors[f"{prefix}.{part}"] for part in PARTS)
                made[f"{prefix}.weight"] = dequantise_weight(*parts, torch.float32)
            elif kind not in PARTS:
                made[name] = tensor.float()
        return made

    _rewrite(source, target, change, None)


def _rewrite(source, target, change: Callable[[dict], dict], quantization: dict | None) -> None:
    """Copy a folder with other tensors, and what its config.json says of their quantisation."""
    source, target = Path(source), Path(target)
    tensors = change(load_file(source / "model.safetensors"))
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
