"""KVCache: the memory of the block pool (物理块池), and the only code that copies or swaps blocks.

    layers[i]  [2, num_blocks, block_size, num_kv_heads, head_dim]    on the device; [0] holds K, [1] holds V
    scales[i]  [2, num_blocks, block_size, num_kv_heads]              fp32, of int8 K and V only (quantize.py)
    cpu_pool   [num_cpu_blocks, bytes_per_block]                      bytes on the host, pinned for CUDA

        copy: gpu -> gpu        swap_out: gpu -> cpu        swap_in: cpu -> gpu

One block id means the same block in every layer, so an operation moves all layers, with their scales, or none. On
the host a block is one piece, so that a swap is one transfer of `bytes_per_block`, not two small ones a layer.
Everything runs on the current stream in the order of the list.
"""

from collections.abc import Iterable
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from kvlab import sizing
from kvlab.model.config import ModelConfig
from kvlab.model.quantize import SCALE_BYTES, dequantize, quantize

MAX_RUN = 32  # blocks moved at once: bounds the staging buffer
KINDS = ("copy", "swap_out", "swap_in")
BlockOp = tuple[str, int, int]  # (kind, source block, destination block)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of K and V that one token keeps (L33 0.1), scales included if dtype is int8."""
    return sizing.kv_bytes_per_token(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype.itemsize,
        scale_bytes=SCALE_BYTES if dtype == torch.int8 else 0,
    )  # fmt: skip


class KVCache:
    """Zeroed memory for `num_blocks` blocks of `block_size` tokens, and `num_cpu_blocks` more on the host.

    Block 0 is the null block: it stays zero, and padding may read it. So num_blocks - 1 blocks hold tokens.
    dtype: what K and V are stored as; torch.int8 quantises them, with a scale for each token and KV head.
    Raises ValueError for a block size under 1, fewer than 2 blocks, or another dtype of whole numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_cpu_blocks: int = 0,
    ):
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block must hold at least 1 token")
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: at least 2 are needed, one of them the null block")
        if num_cpu_blocks < 0:
            raise ValueError(f"num_cpu_blocks is {num_cpu_blocks}: give 0 for no swap space")
        if not dtype.is_floating_point and dtype != torch.int8:
            raise ValueError(f"dtype is {dtype}: K and V are stored as floating point, or as torch.int8 with scales")
        self.num_blocks, self.block_size, self.num_cpu_blocks = num_blocks, block_size, num_cpu_blocks
        self.device, self.dtype = torch.device(device), dtype
        self.bytes_per_block = kv_bytes_per_token(config, dtype) * block_size
        self.block_shape = (block_size, config.num_key_value_heads, config.head_dim)
        self.layers = [
            torch.zeros((2, num_blocks, *self.block_shape), dtype=dtype, device=self.device)
            for _ in range(config.num_hidden_layers)
        ]
        self.scales = [torch.zeros(x.shape[:-1], device=self.device) for x in self.layers if self.quantized]
        # All that a block consists of. Scales first: in a block's bytes they then lie at multiples of 4.
        self.tensors = [*self.scales, *self.layers]
        pin = self.device.type == "cuda" and num_cpu_blocks > 0
        host = dict(dtype=torch.uint8, device="cpu", pin_memory=pin)
        self.cpu_pool = torch.zeros((num_cpu_blocks, self.bytes_per_block), **host)
        # Not num_cpu_blocks alone: siblings may each take their own copy of one CPU block, in one run.
        rows = min(MAX_RUN, max(num_blocks, num_cpu_blocks)) if num_cpu_blocks else 0
        self._staging = torch.empty((rows, self.bytes_per_block), dtype=torch.uint8, device=self.device)
        self._staging_pieces = self.pieces(self._staging)
        self._kernels = None

    @property
    def quantized(self) -> bool:
        """Whether K and V are whole numbers with scales."""
        return self.dtype == torch.int8

    def pieces(self, pool: Tensor) -> list[Tensor]:
        """Blocks as bytes, uint8 [n, bytes_per_block] -> for each of `tensors` a view [n, 2, block_size, ...]."""
        views, start = [], 0
        for tensor in self.tensors:
            shape = (2, *tensor.shape[2:])
            end = start + prod(shape) * tensor.itemsize
            views.append(pool[:, start:end].view(tensor.dtype).unflatten(1, shape))
            start = end
        return views

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Put this step's k and v [T, num_kv_heads, head_dim] into a layer's slots int64 [T] (L33 2.2), as `dtype`."""
        for half, x in enumerate((k, v)):
            if self.quantized:
                x, scales = quantize(x)
                self.scales[layer][half].flatten(0, 1).index_copy_(0, slot_mapping, scales)
            self.layers[layer][half].flatten(0, 1).index_copy_(0, slot_mapping, x.to(self.dtype))

    def as_read(self, x: Tensor) -> Tensor:
        """k or v [T, num_kv_heads, head_dim] as it comes back once it has been stored, in its own dtype."""
        return dequantize(*quantize(x), x.dtype) if self.quantized else x.to(self.dtype).to(x.dtype)

    def layer(self, layer: int, dtype: torch.dtype) -> Tensor:
        """A layer's K and V as numbers of dtype: a copy if they are stored otherwise."""
        if self.quantized:
            return dequantize(self.layers[layer], self.scales[layer], dtype)
        return self.layers[layer].to(dtype)

    def apply(self, block_ops: Iterable[BlockOp]) -> None:
        """Execute (kind, src, dst) operations with the effect of one after the other (L33 2.4 copies, 5.2
        swaps).

        Neighbours of one kind are moved together as long as none depends on another. The whole list is
        checked first: a ValueError (unknown kind, block out of range, a write to the null block) leaves every
        block as it was.
        """
        block_ops = list(block_ops)
        for op in block_ops:
            self._check(op)
        for kind, sources, targets in independent_runs(block_ops):
            if kind == "copy":
                self._copy(sources, targets)
            elif kind == "swap_out":
                self._gather(sources)
                for row, target in enumerate(targets):
                    self.cpu_pool[target].copy_(self._staging[row], non_blocking=True)
            else:
                for row, source in enumerate(sources):
                    self._staging[row].copy_(self.cpu_pool[source], non_blocking=True)
                self._scatter(targets)

    def use_kernels(self, block_copy: ModuleType) -> None:
        """Move blocks by the kernel of kvlab_kernels.block_copy: one launch a run, not two for each tensor.

        The module is handed in because it stands on this one. Call it while no block holds anything: some are moved, to
        have the kernel compiled. Where that fails, PyTorch moves them as before, and the error is passed on.
        """
        pieces = block_copy.pieces_of(self.tensors)
        self._kernels = block_copy, pieces, block_copy.pieces_of_rows(self._staging, pieces)
        try:
            self._copy([0], [1])
            if len(self._staging):
                self._gather([0])
                self._scatter([1])
        except BaseException:
            self._kernels = None
            raise

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        """Blocks to blocks, all read before any is written."""
        if self._kernels:
            kernels, pieces, _ = self._kernels
            return kernels.copy_blocks(pieces, zip(sources, targets, strict=True))
        src, dst = (torch.tensor(blocks, device=self.device) for blocks in (sources, targets))
        for tensor in self.tensors:
            tensor.index_copy_(1, dst, tensor.index_select(1, src))

    def _gather(self, sources: list[int]) -> None:
        """Blocks to the first rows of the staging buffer."""
        if self._kernels:
            kernels, pieces, rows = self._kernels
            return kernels.gather_blocks(pieces, sources, rows)
        src = torch.tensor(sources, device=self.device)
        for tensor, piece in zip(self.tensors, self._staging_pieces, strict=True):
            piece[: len(sources)] = tensor.index_select(1, src).transpose(0, 1)

    def _scatter(self, targets: list[int]) -> None:
        """And back."""
        if self._kernels:
            kernels, pieces, rows = self._kernels
            return kernels.scatter_blocks(rows, pieces, targets)
        dst = torch.tensor(targets, device=self.device)
        for tensor, piece in zip(self.tensors, self._staging_pieces, strict=True):
            tensor.index_copy_(1, dst, piece[: len(targets)].transpose(0, 1))

    def _check(self, op: BlockOp):
        kind, src, dst = op
        if kind not in KINDS:
            raise ValueError(f"block operation {op}: kind must be one of {KINDS}")
        src_blocks = self.num_cpu_blocks if kind == "swap_in" else self.num_blocks
        dst_blocks = self.num_cpu_blocks if kind == "swap_out" else self.num_blocks
        if not (0 <= src < src_blocks and 0 <= dst < dst_blocks):
            raise ValueError(
                f"block operation {op}: source must be below {src_blocks}, target below {dst_blocks}"
            )
        if dst == 0 and kind != "swap_out":
            raise ValueError(f"block operation {op} writes to block 0: the null block must stay zero")


def independent_runs(
    block_ops: Iterable[BlockOp], at_once: bool = False
) -> list[tuple[str, list[int], list[int]]]:
    """Cut an ordered list into runs (kind, sources, targets) whose reads may all come before their writes.

    An operation starts a new run when it writes a block that the run has written, or reads one that it has
    written (only a copy can: a swap reads one memory and writes the other). at_once: also when it writes a block
    that the run reads, so that a run's operations may happen in any order, as the programs of a kernel do.
    """
    runs, written, read = [], set(), set()
    for kind, src, dst in block_ops:
        hazard = dst in written or (kind == "copy" and (src in written or (at_once and dst in read)))
        if not runs or runs[-1][0] != kind or len(runs[-1][1]) == MAX_RUN or hazard:
            runs.append((kind, [], []))
            written, read = set(), set()
        read.add(src)
        runs[-1][1].append(src)
        runs[-1][2].append(dst)
        written.add(dst)
    return runs
