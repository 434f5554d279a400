"""Settings for all tests: no deadline for hypothesis (a busy machine is not a failure), one thread for torch."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("kvlab", deadline=None)
settings.load_profile("kvlab")
