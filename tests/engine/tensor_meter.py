"""A meter for the CPU that counts: the bytes of every tensor that an operation makes, for as long as it lives."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMeter(TorchDispatchMode):
    """kvlab.engine.profile.Meter of a device of `total_bytes`, on which `used` bytes are taken already.

    Storages are counted, not tensors: views take nothing. Memory inside an operation is not seen.
    """

    def __init__(self, total_bytes: int, used: int):
        super().__init__()
        self.total_bytes, self._used = total_bytes, used
        self.alive = self.peak = 0
        self._known = set()
        self.largest_shapes: list[tuple] = []

    def used_bytes(self) -> int:
        return self._used

    def start(self) -> None:
        self.__enter__()

    def peak_bytes(self) -> int:
        self.__exit__(None, None, None)
        return self.peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (key := self._key(x)) not in before and key not in self._known:
                self._count(x, key)
        return result

    @staticmethod
    def _key(x: torch.Tensor) -> int | None:
        return None if x.layout == torch._mkldnn else x.untyped_storage()._cdata

    def _count(self, x: torch.Tensor, key: int | None) -> None:
        if key is None:  # packed weights: made before, and no step makes more
            return
        num_bytes = x.untyped_storage().nbytes()
        self._known.add(key)
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(x.untyped_storage(), self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.alive -= num_bytes
