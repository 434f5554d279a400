"""Count the places where the host would wait for a GPU, on a CPU: whatever brings a value of a tensor to Python."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CALLS = {"tolist", "numpy", "cpu"}  # no operation of PyTorch on a CPU, but a wait on a GPU
OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim",
              "unique_consecutive", "repeat_interleave", "is_nonzero", "allclose",
              "lift_fresh"}  # torch.tensor([...]): a copy from memory that is not pinned  # fmt: skip


class _Calls(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (name := getattr(function, "__name__", "")) in CALLS:
            self.found.append(name)
        return function(*args, **kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name in OPERATIONS or masks:
            self.found.append(f"aten::{name}")
        return operation(*args, **kwargs or {})


class HostWaits:
    """`with HostWaits() as waits:` then waits.found has one entry for each time the host looked at a tensor's value."""

    def __init__(self):
        self.found: list[str] = []
        self._modes = _Calls(self.found), _Operations(self.found)

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self._modes):
            mode.__exit__(*error)
