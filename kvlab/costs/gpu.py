"""The cost of a step on a GPU, from first principles: what must be moved and computed, and how fast that can go.

    linears      max(2 FLOP a weight and token / FLOP/s,   weight bytes / bandwidth)      all share the weights
    attention    max(FLOP of all pairs / FLOP/s,           K/V bytes / bandwidth)         each reads its own
    head         max(FLOP of the logits / FLOP/s,          its bytes / bandwidth)
    launches     what the host needs to launch all kernels beyond what they take: it runs ahead of the GPU
    host         scheduling and input preparation, before the forward
    copies       blocks on the GPU: read and written; blocks over PCIe, each direction by itself

One kernel follows the other, so the parts add up, where `primer.step_seconds` takes one maximum over the whole step:
that is the bound of this. Within attention, chunks and decodes are taken as one kernel.
"""

from dataclasses import dataclass
from functools import cached_property

from kvlab.costs.preemption import transfer_seconds
from kvlab.costs.work import Breakdown, Part, StepWork
from kvlab.primer import GPU, GPUS, flops_per_logits, flops_per_pair, flops_per_token
from kvlab.sizing import ModelShape, model_shape


@dataclass(frozen=True, kw_only=True)
class GPUCost:
    """Prices steps of a model on `num_gpus` equal GPUs that share every matrix and every KV head.

    What they say to each other is left out.
    dtype_bytes, kv_dtype_bytes: of a weight, of an entry of K and V. kv_scale_bytes: of the scale of each head's K and
    V, 4 for int8 and else 0. block_size: tokens a block.

    The rest are estimates, to be replaced by what you measure:
    compute_efficiency, memory_efficiency, pcie_efficiency: the share of the data sheet's figure that is reached.
    kernels_per_layer, launch_seconds: launches of a layer, and the host's time for one (4-6 us is often measured;
    with CUDA graphs it is below 1). host_seconds, host_seconds_per_sequence: the engine's work before each forward.
    transfers_per_block: pieces in which a block crosses PCIe: 1 where it is gathered first, as here, and twice the
    layers where each layer's K and V go by themselves. transfer_latency: fixed seconds of each piece.
    """

    gpu: GPU
    shape: ModelShape
    dtype_bytes: float = 2
    kv_dtype_bytes: int = 2
    kv_scale_bytes: int = 0
    block_size: int = 16
    num_gpus: int = 1
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    pcie_efficiency: float = 0.8
    kernels_per_layer: int = 12
    launch_seconds: float = 5e-6
    host_seconds: float = 100e-6
    host_seconds_per_sequence: float = 2e-6
    transfers_per_block: int = 1
    transfer_latency: float = 10e-6

    def __post_init__(self):
        for name in ("compute_efficiency", "memory_efficiency", "pcie_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a share in (0, 1]")
        for name in ("dtype_bytes", "kv_dtype_bytes", "block_size", "num_gpus"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a number above 0")
        for name in ("kernels_per_layer", "launch_seconds", "host_seconds", "host_seconds_per_sequence",
                     "transfers_per_block", "transfer_latency", "kv_scale_bytes"):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give 0 or more")

    @classmethod
    def of(cls, gpu: str | GPU, model: str | ModelShape, **options) -> "GPUCost":
        """By the names of kvlab.primer.GPUS and kvlab.sizing.MODELS, or for a GPU or a shape of your own."""
        if isinstance(gpu, str):
            if gpu not in GPUS:
                raise ValueError(f"no GPU {gpu!r} in the table: known are {', '.join(GPUS)}; or give a primer.GPU")
            gpu = GPUS[gpu]
        return cls(gpu=gpu, shape=model_shape(model) if isinstance(model, str) else model, **options)

    # Asked for in every step, so worked out once.

    @cached_property
    def flops_rate(self) -> float:
        """FLOP/s that all GPUs reach together."""
        return self.gpu.peak_flops * self.compute_efficiency * self.num_gpus

    @cached_property
    def memory_rate(self) -> float:
        """Bytes/s that all GPUs read together."""
        return self.gpu.bandwidth * self.memory_efficiency * self.num_gpus

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token keeps (L33 0.1)."""
        return self.shape.kv_bytes_per_token(self.kv_dtype_bytes, self.kv_scale_bytes)

    @cached_property
    def launching(self) -> float:
        """Seconds of all launches of a step."""
        return self.launch_seconds * self.kernels_per_layer * self.shape.num_hidden_layers

    @cached_property
    def linears(self) -> tuple[int, float]:
        """FLOP of a token in the layers' matrices, and their bytes."""
        return flops_per_token(self.shape), self.shape.num_layer_weights * self.dtype_bytes

    @cached_property
    def head(self) -> tuple[int, float]:
        """FLOP of a row of logits, and the bytes of the head."""
        return flops_per_logits(self.shape), self.shape.vocab_size * self.shape.hidden_size * self.dtype_bytes

    @cached_property
    def pair_flops(self) -> int:
        return flops_per_pair(self.shape)

    @property
    def weights_fit(self) -> bool:
        """Whether the weights alone fit the GPUs' memory; a price of what does not fit is one on paper."""
        return self.shape.weight_bytes(self.dtype_bytes) <= self.gpu.memory * self.num_gpus

    def step_seconds(self, work: StepWork) -> float:
        """Seconds of one step: what the parts of `explain` add up to, to the last digit, without making them."""
        sequences, _, tokens, logits, pairs, read, *copies = work
        if not tokens or any(copies):
            return self.explain(work).seconds
        flops_rate, memory_rate = self.flops_rate, self.memory_rate
        flops, moved = self.linears
        linears = max(flops * tokens / flops_rate, moved / memory_rate)
        attention = max(self.pair_flops * pairs / flops_rate, read * self.kv_bytes_per_token / memory_rate)
        flops, moved = self.head
        head = max(flops * logits / flops_rate, moved / memory_rate) if logits else 0.0
        host = self.host_seconds + self.host_seconds_per_sequence * sequences
        waiting = max(0.0, self.launching - (linears + attention + head))
        return host + linears + attention + head + waiting

    def explain(self, work: StepWork) -> Breakdown:
        """Its parts, and what bounds each."""
        kv_bytes = self.kv_bytes_per_token
        block_bytes = kv_bytes * self.block_size
        parts = []
        if work.blocks_copied:
            parts.append(Part("copies", 2 * work.blocks_copied * block_bytes / self.memory_rate, "memory"))
        for name, blocks in (("swap out", work.blocks_swapped_out), ("swap in", work.blocks_swapped_in)):
            if blocks:
                parts.append(Part(name, self._over_pcie(blocks, block_bytes), "pcie"))
        if work.num_tokens:
            parts.append(Part("host", self.host_seconds + self.host_seconds_per_sequence * work.num_sequences, "host"))
            (flops, moved), (head_flops, head_moved) = self.linears, self.head
            kernels = [
                self._kernel("linears", flops * work.num_tokens, moved),
                self._kernel("attention", self.pair_flops * work.attention_pairs, work.kv_tokens_read * kv_bytes),
            ]
            if work.num_logits:
                kernels.append(self._kernel("head", head_flops * work.num_logits, head_moved))
            waiting = self.launching - sum(part.seconds for part in kernels)
            parts += [*kernels, Part("launches", max(0.0, waiting), "launch")]
        return Breakdown(tuple(parts))

    def _kernel(self, name: str, flops: float, num_bytes: float) -> Part:
        compute, memory = flops / self.flops_rate, num_bytes / self.memory_rate
        return Part(name, max(compute, memory), "compute" if compute > memory else "memory")

    def _over_pcie(self, blocks: int, block_bytes: int) -> float:
        if not self.gpu.pcie_bandwidth:
            raise ValueError("the step swaps, and this GPU's pcie_bandwidth is 0: give it in bytes/s for one direction")
        pieces = blocks * self.transfers_per_block
        bandwidth = self.gpu.pcie_bandwidth * self.pcie_efficiency * self.num_gpus  # each has a link of its own
        return transfer_seconds(blocks * block_bytes, bandwidth, self.transfer_latency, pieces)
