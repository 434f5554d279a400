"""The kernels, interpreted (tests/conftest.py has set TRITON_INTERPRET before anything could import Triton), every
load and store checked. On a GPU machine `TRITON_INTERPRET=0 python -m pytest tests/kernels` runs the same tests
compiled."""

import contextlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton has wheels for Linux only")
pytest.importorskip("kvlab_kernels", reason="kvlab is not installed here; make test installs it")

from kvlab_kernels import launch  # noqa: E402


@pytest.fixture(autouse=True)
def sanitized():
    with contextlib.ExitStack() as stack:
        if launch.INTERPRETED:
            from kvlab_kernels.sanitizer import sanitize

            stack.enter_context(sanitize())
        yield
