"""A step's inputs in one piece: laid out on the host, sent to the device in one copy.

    host     [ token_ids | positions | slot_mapping | ... | block_tables | uniforms ]     pinned, for CUDA
                  |  one asynchronous copy
    device   [ the same  ]                      the step's tensors are views of it

Ten small copies would cost ten launches, and from memory that is not pinned (锁页) each makes the host wait. Where a
piece lies follows from the shapes alone, so that steps of equal shapes find their inputs at equal addresses: what a
CUDA graph needs. On a CPU there is nothing to copy: the device's buffer is the host's.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # bytes. Triton compiles another kernel for a pointer that is not a multiple of 16
DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float64): torch.float64}


class StagingBuffer:
    """Room for `num_bytes` on the host and on `device`, which never moves.

    Pieces that do not fit go to a second buffer, which grows: first pieces keep their addresses, whatever a step asks.
    """

    def __init__(self, num_bytes: int, device: torch.device | str):
        self.device = torch.device(device)
        self.fixed, self.overflow = _Memory(num_bytes, self.device), _Memory(0, self.device)
        self._sent = torch.cuda.Event() if self.device.type == "cuda" else None
        self._key = None  # of the last layout

    def lay_out(self, shapes: Mapping[str, tuple]) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
        """{name: (NumPy dtype, shape)} -> arrays to write, and the tensors that hold them once `send` has been called.

        Both are good until the next call: whatever the last step enqueued must have read its inputs by then, on a CPU;
        on CUDA the stream sees to it, and this waits until the last copy has left the host's buffer.
        """
        if self._sent is not None:
            self._sent.synchronize()  # nearly always over: a step that samples has waited for all before
        key = tuple(shapes.items())
        if key == self._key:  # of two decode steps the second is often laid out as the first
            return self._views
        self.fixed.used = self.overflow.used = 0
        places = []
        for name, (dtype, shape) in shapes.items():
            dtype, count = np.dtype(dtype), prod(shape)
            size = -(-count * dtype.itemsize // ALIGN) * ALIGN
            memory = self.fixed if self.fixed.used + size <= len(self.fixed.host) else self.overflow
            places.append((name, memory, dtype, shape, memory.used // dtype.itemsize, count))
            memory.used += size
        if self.overflow.used > len(self.overflow.host):
            self.overflow.allocate(2 * self.overflow.used)
        arrays, tensors = {}, {}
        for name, memory, dtype, shape, first, count in places:
            arrays[name] = memory.arrays[dtype][first : first + count].reshape(shape)
            tensors[name] = memory.tensors[dtype][first : first + count].view(shape)
        self._key, self._views = key, (arrays, tensors)
        return self._views

    def send(self) -> None:
        """Enqueue the copy of all that was laid out."""
        if self._sent is not None:
            for memory in (self.fixed, self.overflow):
                if memory.used:
                    memory.on_device[: memory.used].copy_(memory.host[: memory.used], non_blocking=True)
            self._sent.record()


class _Memory:
    """The same bytes on the host and on the device, and both as numbers of each dtype."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.device, self.used = device, 0
        self.allocate(num_bytes)

    def allocate(self, num_bytes: int) -> None:
        size, on_gpu = -(-num_bytes // ALIGN) * ALIGN, self.device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self.on_device = torch.empty_like(self.host, device=self.device) if on_gpu else self.host
        self.arrays = {dtype: self.host.numpy().view(dtype) for dtype in DTYPES}
        self.tensors = {dtype: self.on_device.view(of_torch) for dtype, of_torch in DTYPES.items()}
