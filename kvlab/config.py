"""All settings of an engine in one place, checked when made. Names are vLLM's wherever it has one."""

from collections.abc import Sequence
from dataclasses import dataclass

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8")


@dataclass(kw_only=True)
class EngineConfig:
    """Settings that the scheduler, the manager and the engine share.

    block_size: tokens per KV block (L33 2.2).
    num_gpu_blocks_override: blocks in the pool, null block included; None sizes the pool from memory (PAV 3.1).
    gpu_memory_utilization: share of the GPU's memory the engine may use, in (0, 1]. (On a CPU the pool is 1 GiB.)
    swap_space: CPU memory for swapped-out K/V, GiB; num_cpu_blocks_override says it in blocks.
    max_model_len: longest sequence, prompt and outputs; None is what model and pool allow.
    max_num_seqs: seats: sequences that run at once.
    max_num_batched_tokens: the token budget of one step (L33 4.3).
    enable_chunked_prefill: let a prompt be computed over several steps (L33 4.2).
    long_prefill_token_threshold: at most so many tokens of one prompt in a step; 0 is no limit but the budget.
    enable_prefix_caching: share and keep full blocks of equal prefixes (L33 6).
    batching: "continuous" (L33 3.2), or "static", which lets nobody in until the whole batch has finished (3.1).
    reservation: "paged", or "contiguous", which reserves consecutive blocks for max_model_len at admission (L33 1).
    seed: where the seeds of requests that bring none come from.
    dtype: of weights and activations; "auto" is bfloat16 on CUDA and float32 on a CPU.
    kv_cache_dtype: K and V are stored as this; "auto" is dtype, "int8" quantises them (量化).
    quantization: "awq" insists on a checkpoint with weights in 4 bits; None takes what the checkpoint has (PAV 3.1).
    device: "auto", "cpu" or "cuda".
    attention_backend: "torch", "triton" (the kernels; without a GPU interpreted, slowly), "naive" (the slow oracle), or
        "auto": "triton" on a GPU that can run it, "torch" elsewhere.
    enforce_eager: never replay decodes as CUDA graphs. (They are replayed with attention backend "triton" on a GPU.)
    cudagraph_capture_sizes: batch sizes to capture graphs for; None is 1, 2, 4, 8, 16, 24, ... max_num_seqs.
    deterministic_split_tokens: of "triton": cut each context after so many tokens, so that a sequence's attention does
        not depend on its batch, to the last bit; 0 cuts as is quickest.
    """

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0.0
    num_cpu_blocks_override: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    batching: str = "continuous"
    reservation: str = "paged"
    seed: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    attention_backend: str = "auto"
    deterministic_split_tokens: int = 0
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None

    def __post_init__(self):
        at_least = [
            ("block_size", 1, "a block holds at least 1 token; 16 is usual"),
            ("num_gpu_blocks_override", 2, "the null block and at least one more"),
            ("num_cpu_blocks_override", 0, "0 is no swap space"),
            ("max_model_len", 2, "a prompt of 1 token and 1 output"),
            ("max_num_seqs", 1, "at least one sequence must run"),
            ("max_num_batched_tokens", 1, "a step computes at least 1 token"),
            ("long_prefill_token_threshold", 0, "0 is no limit"),
            ("deterministic_split_tokens", 0, "0 is off"),
        ]
        for name, least, why in at_least:
            value = getattr(self, name)
            if value is None and name.endswith(("override", "max_model_len")):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}: use a whole number >= {least} ({why})")
        real = lambda value: isinstance(value, int | float) and not isinstance(value, bool)  # noqa: E731
        if not (real(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1):
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}: use a share in (0, 1], such as 0.9"
            )
        if not (real(self.swap_space) and 0 <= self.swap_space < float("inf")):
            raise ValueError(f"swap_space is {self.swap_space!r} GiB: use 0 for none, or a positive number")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}: use a whole number")
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: use True or False")
        for size in self.cudagraph_capture_sizes or ():
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= self.max_num_seqs:
                raise ValueError(
                    f"cudagraph_capture_sizes holds {size!r}: use whole numbers from 1 to max_num_seqs "
                    f"({self.max_num_seqs}), or None for the usual ones"
                )
        if not isinstance(self.attention_backend, str):
            raise ValueError(
                f"attention_backend is {self.attention_backend!r}: use 'auto', 'torch', 'triton' or 'naive'"
            )
        choices = [
            ("batching", ("continuous", "static")),
            ("reservation", ("paged", "contiguous")),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("quantization", (None, "awq")),
        ]
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(map(str, allowed))}")
        if not self.enable_chunked_prefill and self.max_model_len and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a prompt must fit one step: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len ({self.max_model_len})"
            )
