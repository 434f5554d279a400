"""Settings for all tests: no deadline for hypothesis (a busy machine is not a failure), one thread for torch.

`make test` draws the same examples each time, so that it says something about the change and not about luck;
`make test-all` draws new ones.

Triton decides while it is imported whether kernels are interpreted, and transformers imports it in passing, from
whichever test comes first. So it is said here, before any of them: interpreted, unless the environment says
otherwise.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, print_blob=True)
settings.load_profile("same")
