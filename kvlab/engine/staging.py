"""A step's inputs in one piece: laid out on the host, sent to the device in one copy.

    host     [ token_ids | positions | slot_mapping | ... | block_tables | uniforms ]     pinned, for CUDA
                  |  one asynchronous copy
    device   [ the same  ]                      the step's tensors are views of it

Ten small copies would cost ten launches, and from memory that is not pinned (锁页) each makes the host wait. Where a
piece lies follows from the shapes alone, so that steps of equal shapes find their inputs at equal addresses: what a
CUDA graph needs. On a CPU there is nothing to copy: the device's buffer is the host's.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # bytes. Triton compiles another kernel for a pointer that is not a multiple of 16
DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float64): torch.float64}


class StagingBuffer:
    """Room for `num_bytes` on the host and on `device`; it grows when a step needs more.

    `generation` counts how often it has moved: addresses from an earlier one are void.
    """

    def __init__(self, num_bytes: int, device: torch.device | str):
        self.device = torch.device(device)
        self.generation = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        size, on_gpu = -(-num_bytes // ALIGN) * ALIGN, self.device.type == "cuda"
        host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._host, self._on_device = host, torch.empty_like(host, device=self.device) if on_gpu else host
        self._arrays = {dtype: host.numpy().view(dtype) for dtype in DTYPES}
        self._tensors = {dtype: self._on_device.view(of_torch) for dtype, of_torch in DTYPES.items()}
        self._sent = torch.cuda.Event() if on_gpu else None
        self._key = None  # of the last layout

    def lay_out(self, shapes: Mapping[str, tuple]) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
        """{name: (NumPy dtype, shape)} -> arrays to write, and the tensors that hold them once `send` has been called.

        Both are good until the next call: whatever the last step enqueued must have read its inputs by then, on a CPU;
        on CUDA the stream sees to it, and this waits until the last copy has left the host's buffer.
        """
        key = tuple(shapes.items())
        if self._sent is not None:
            self._sent.synchronize()  # nearly always over: a step that samples has waited for all before
        if key == self._key:  # of two decode steps the second is often laid out as the first
            return self._views
        places, end = [], 0
        for name, (dtype, shape) in shapes.items():
            dtype, count = np.dtype(dtype), 1
            for n in shape:
                count *= n
            places.append((name, dtype, shape, end // dtype.itemsize, count))
            end += -(-count * dtype.itemsize // ALIGN) * ALIGN
        if end > len(self._host):
            self._allocate(max(end, 2 * len(self._host)))
            self.generation += 1
        self._used = end
        arrays, tensors = {}, {}
        for name, dtype, shape, first, count in places:
            arrays[name] = self._arrays[dtype][first : first + count].reshape(shape)
            tensors[name] = self._tensors[dtype][first : first + count].view(shape)
        self._key, self._views = key, (arrays, tensors)
        return self._views

    def send(self) -> None:
        """Enqueue the copy of all that was laid out."""
        if self._sent is not None:
            self._on_device[: self._used].copy_(self._host[: self._used], non_blocking=True)
            self._sent.record()
