"""Models beyond the weight tables of slime-convert, by the name mapping and the reshaping of another project.

Only mbridge is one. Its methods are asked weight by weight, so a conversion streams as it does without it: Megatron's
model exists on torch's meta device alone, to tell its names and shapes. Neither a GPU nor a process group is needed,
and what the libraries would change in the process is put back.

Importing this imports none of them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_convert.errors import BridgeError
from slime_convert.mapping import WeightTranslation
from slime_convert.shape.families import BRIDGES


def bridged_weights(
    bridge: str,
    hf_directory: str | Path,
    *,
    flags: Mapping[str, Any] | None = None,
    make_vocab_size_divisible_by: int = 1,
) -> WeightTranslation:
    """The weights of the model that a Hugging Face directory describes, as a bridge knows them.

    Args:
        bridge: One of :data:`slime_convert.shape.families.BRIDGES`.
        hf_directory: Holds ``config.json``.
        flags: Shape flags to be checked against the config, by ``dest``.
        make_vocab_size_divisible_by: The embedding is padded to a multiple of this.

    Raises:
        BridgeError: The bridge is unknown, or its extra is not installed.
        HfConfigError: There is no readable ``config.json``.
        UnsupportedModelError: The bridge does not know the model, or cannot convert it here.
        ShapeMismatchError: Flags contradict the config.
    """
    if bridge not in BRIDGES:
        raise BridgeError(f"bridge {bridge!r} is unknown; allowed: {', '.join(map(repr, BRIDGES))}")
    with warnings.catch_warnings():
        # About Transformer Engine and Apex, which nothing here needs, and the libraries' own deprecated settings.
        warnings.simplefilter("ignore")
        try:
            for package in ("transformers", "megatron.core", "einops", "mbridge"):
                importlib.import_module(package)
        except ImportError as error:
            raise BridgeError(
                f"bridge {bridge!r} needs {error.name}, which is not installed; pip install 'slime-convert[mbridge]'"
            ) from error
        from slime_convert.bridge.weights import BridgedWeights

        return BridgedWeights(hf_directory, flags or {}, make_vocab_size_divisible_by)
