"""Set before any test imports torch: these tests share small machines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
