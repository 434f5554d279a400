"""The linear layer with weights in 4 bits, and who multiplies by them: a kernel, or the weights written out once.

    qweight, qzeros, scales --repack-->  kvlab_kernels.awq_matmul     4 bits in memory, unpacked in each product
                            --dequantise_weight--> layers.Linear      the memory of a plain checkpoint

The format itself is in awq.py, on which the kernel stands, too.
"""

from subprocess import SubprocessError

import torch
from torch import Tensor

from kvlab.model.awq import dequantise_weight, unpack
from kvlab.model.layers import Linear


def uses_kernel(attention_backend: str, device: torch.device | str) -> bool:
    """Whether an engine with these options multiplies in 4 bits, by kvlab_kernels.awq_matmul.

    "triton" does, also where it is interpreted; "auto" on a GPU that can run the kernels.
    """
    on_gpu = torch.device(device).type == "cuda"
    if attention_backend != "auto" or not on_gpu:
        return attention_backend == "triton"
    try:
        from kvlab_kernels.launch import INTERPRETED, triton

        if not INTERPRETED:
            triton.runtime.driver.active  # noqa: B018 (built when it is first asked for, by a C compiler with Python.h)
    except (ImportError, RuntimeError, SubprocessError):
        return False
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 0)


class AWQLinear:
    """y = x W^T + b with W in 4 bits. In place of `Linear`, for x [T, in] -> [T, out].

    kernel: keep the weight in 4 bits and multiply by kvlab_kernels.awq_matmul. Otherwise the weight is written out once
    in `dtype`, the model's, and `Linear` does the rest. In fp32 that takes 8 times the memory of 4 bits, 26 GB for the
    layers of Qwen2.5-7B, in 16 bits 4 times. It is the quick way on a CPU all the same: to unpack a matrix takes far
    longer than to multiply by it. float64 is always written out.
    """

    def __init__(self, qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None, *,
                 dtype: torch.dtype, kernel: bool = False, pack: bool = True):  # fmt: skip
        self.in_features, self.out_features = len(qweight), scales.shape[1]
        self.dtype, self.bias = dtype, bias
        self.kernel = kernel and dtype != torch.float64
        if self.kernel:
            from kvlab_kernels import awq_matmul

            self.weight = awq_matmul.repack(unpack(qweight), scales, qzeros)
            self._product = awq_matmul.awq_matmul
        else:
            self._linear = Linear(dequantise_weight(qweight, qzeros, scales, dtype), bias, pack=pack)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, self.bias) if self.kernel else self._linear(x)

    def warm_up(self, max_rows: int) -> None:
        """Compile what products of up to so many rows can need. Without the kernel: nothing."""
        if self.kernel:
            from kvlab_kernels.warmup import awq_warm_up_rows

            device = self.weight.words.device
            for rows in awq_warm_up_rows(self.in_features, self.out_features, max_rows, self.dtype.itemsize, device):
                self(torch.zeros(rows, self.in_features, dtype=self.dtype, device=device))
