"""Which attention backend: by name, or the quickest that can read the cache here.

    "naive"   loops, the oracle            kvlab.model.attention
    "torch"   PyTorch, on any device       kvlab.model.attention
    "triton"  the kernels                  kvlab.model.triton_attention, imported only when it is asked for
    "auto"    "triton" on a GPU that can run it, else "torch"
"""

import warnings
from subprocess import SubprocessError

from kvlab.model.attention import AttentionBackend, NaiveAttention, TorchAttention
from kvlab.model.kv_cache import KVCache

BACKENDS = {"torch": TorchAttention, "naive": NaiveAttention}


def get_attention_backend(name: str, split_tokens: int = 0) -> AttentionBackend:
    """A new backend: "torch" (any device), "naive" (the readable oracle) or "triton" (the kernels).

    split_tokens: of "triton", see there. ValueError for other names; ImportError, with the remedy, without Triton.
    """
    if name == "triton":
        from kvlab.model.triton_attention import TritonAttention

        return TritonAttention(split_tokens)
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown: use one of {sorted([*BACKENDS, 'triton'])}")
    if split_tokens:
        raise ValueError(
            f"deterministic_split_tokens is {split_tokens}, but attention backend {name!r} has no splits: use 0, or "
            f"attention_backend 'triton'"
        )
    return BACKENDS[name]()


def choose_attention_backend(name: str, kv_cache: KVCache, split_tokens: int = 0) -> AttentionBackend:
    """`get_attention_backend`, for this cache. "auto" is the kernels on a GPU that can run them, else "torch".

    With the kernels, the cache moves its blocks by one too. ValueError, ImportError or RuntimeError if the backend that
    is named cannot read `kv_cache`; on a GPU "auto" warns instead, for "torch" is slower there.
    """
    on_gpu = kv_cache.device.type == "cuda"
    if name not in ("auto", "triton") or (name == "auto" and not on_gpu):
        return get_attention_backend("torch" if name == "auto" else name, split_tokens)
    try:
        backend = get_attention_backend("triton", split_tokens)
        backend.check(kv_cache)
        if name == "auto" and backend.interpreted:
            raise RuntimeError("kernels are interpreted in this process, by TRITON_INTERPRET")
        kv_cache.use_kernels(backend.block_copy)
        return backend
    except (ImportError, RuntimeError, ValueError, SubprocessError) as error:  # the last: gcc, without Python.h
        if name == "triton" or split_tokens:
            raise
        warnings.warn(f"attention backend 'torch', not the quicker 'triton': {error}", stacklevel=2)
        return get_attention_backend("torch")
