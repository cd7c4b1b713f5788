"""Set before any test imports torch: these tests share small machines."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # for planted.py

from hypothesis import settings

settings.load_profile("ci")  # as the workspace's settings do; the tests also run outside it
