"""Finds loads and stores outside the tensors that a kernel was given. In interpreted mode only.

    with sanitize():
        naive_attention(q, kv, block_tables, seq_lens)     # OutOfBounds instead of a neighbour's bytes

Nothing else notices them: a few bytes too far reads what happens to lie there, far too far ends the process. The
check compares each address that is not masked with the memory of the launch's tensors, from a tensor's first byte to
its last; `reaching` names tensors that a kernel finds by an address in a table. It cannot see a load from the wrong
tensor of the launch, or from between the rows of a tensor with gaps. Atomics are not checked; our kernels have none.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvlab_kernels.launch import INTERPRETED  # first: it chooses the mode that Triton is imported in

from triton.runtime import interpreter as inner  # isort: skip


_reached: list = []


class OutOfBounds(Exception):
    """A kernel accessed memory outside all of its tensors."""


@contextmanager
def sanitize() -> Iterator[None]:
    """Check every load and store of the kernels launched inside.

    Raises OutOfBounds, which says how many addresses and where, or RuntimeError where kernels are compiled.
    """
    if not INTERPRETED:
        raise RuntimeError("compiled kernels cannot be checked: start Python with TRITON_INTERPRET=1")
    builder, executor = inner.InterpreterBuilder, inner.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    prepare, call = executor._init_args_hst, executor.__call__
    extents: list[tuple[str, int, int]] = []

    def prepare_and_note(self, args, kwargs):
        args_host, kwargs_host = prepare(self, args, kwargs)
        named = [*zip(self.arg_names, args_host, strict=False), *kwargs_host.items()]
        named += [("a tensor in a table", tensor) for tensor in _reached]
        extents[:] = [extent(name, tensor) for name, tensor in named if hasattr(tensor, "data_ptr") and tensor.numel()]
        return args_host, kwargs_host

    def checked_load(self, ptrs, mask, *rest, **more):
        check("load", ptrs, mask, extents)
        return load(self, ptrs, mask, *rest, **more)

    def checked_store(self, ptrs, value, mask, *rest, **more):
        check("store", ptrs, mask, extents)
        return store(self, ptrs, value, mask, *rest, **more)

    def call_and_unwrap(self, *args, **kwargs):
        try:
            return call(self, *args, **kwargs)
        except Exception as error:  # Triton wraps what a kernel raises, once for each helper on the way
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OutOfBounds):
                cause = cause.__cause__
            if cause is None:
                raise
            raise OutOfBounds(f"{self.fn.__name__}: {cause}") from None

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst, executor.__call__ = prepare_and_note, call_and_unwrap
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst, executor.__call__ = prepare, call


@contextmanager
def reaching(*tensors) -> Iterator[None]:
    """The kernels launched inside may also access these tensors, whose addresses they read from memory."""
    _reached.extend(tensors)
    try:
        yield
    finally:
        del _reached[len(_reached) - len(tensors) :]


def extent(name: str, tensor) -> tuple[str, int, int]:
    """(name, first byte, byte behind the last) of a tensor, whatever its strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return name, tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check(what: str, ptrs, mask, extents: list[tuple[str, int, int]]) -> None:
    """OutOfBounds if an address that is not masked lies outside every extent."""
    size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
    chosen = ptrs.data if mask is None else ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
    addresses = chosen.ravel().astype(np.uint64)
    inside = np.zeros(addresses.shape, bool)
    for _, start, end in extents:
        inside |= (addresses >= start) & (addresses <= end - size)
    if inside.all():
        return
    first = int(addresses[~inside][0])
    name, start, end = min(extents, key=lambda e: min(abs(first - e[1]), abs(first - e[2])))
    where = f"{start - first} bytes before" if first < start else f"{first + size - end} bytes behind the end of"
    raise OutOfBounds(
        f"{what}: {(~inside).sum()} of {inside.size} addresses lie outside every tensor of the launch; the first is "
        f"{where} {name}"
    )
