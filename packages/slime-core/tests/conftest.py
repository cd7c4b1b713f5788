"""Set before any test imports torch: these tests share small machines."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.load_profile("ci")  # as the workspace's settings do; the tests also run outside it
