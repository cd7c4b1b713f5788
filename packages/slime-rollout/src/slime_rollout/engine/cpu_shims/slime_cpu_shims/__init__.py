"""Lets SGLang 0.5 run on a CPU without CUDA's packages, and start quickly: nothing of SGLang is edited or copied.

``stand_ins`` has modules for packages that SGLang imports but never calls on a CPU; ``left_out`` those of features that
an engine does not have here, which are a quarter of what it imports; ``structure`` remembers what transformers reads in
each of its files whenever it is imported.

``plugin`` registers ``sampling``, ``attention``, ``experts``, ``prefill`` and ``tokenizers`` through SGLang's own
mechanism, which finds it by the entry point in the dist-info directory. ``models`` is found through
SGLANG_EXTERNAL_MODEL_PACKAGE.
"""

import os
import sys

from slime_cpu_shims import left_out, stand_ins, structure

IMPORT_ALL = "SLIME_ENGINE_IMPORT_ALL"
"""Set to 1, this variable has engines import everything, and read transformers' files each time."""


def install():
    """Let the stand-ins win over installed packages."""
    if os.environ.get(IMPORT_ALL) != "1":
        sys.meta_path.insert(0, left_out.LeaveOut())
        sys.meta_path.insert(0, structure.Remember())
    sys.meta_path.insert(0, stand_ins.StandInFor())
