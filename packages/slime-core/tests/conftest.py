"""Set before any test imports torch: these tests share small machines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("slime", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("slime")
