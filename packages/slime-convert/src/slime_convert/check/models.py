"""``check-model`` from Python.

From any ``config.json``: transformers = there and back = megatron-core = export. Importing this loads neither torch nor
transformers, and Megatron runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_convert.check.results import CheckResult
from slime_convert.errors import CheckError
from slime_convert.extras import install_hint


def check_model(model: str | Path | Mapping[str, Any], *, megatron: bool = True) -> CheckResult:
    """Make a tiny random model of the same kind, and prove that it converts.

    Args:
        model: A model directory, a ``config.json``, or the config as a mapping. Weights are not read.
        megatron: Run the tiny model in megatron-core too, if that is installed.

    Raises:
        CheckError: transformers is not installed, or no tiny model can be made of the config.
        HfConfigError: The config cannot be read, or an entry is missing or of a wrong type.
        UnsupportedModelError: The model is not supported.
    """
    return check_models([model], megatron=megatron)[0]


def check_models(models: Sequence[str | Path | Mapping[str, Any]], *, megatron: bool = True) -> list[CheckResult]:
    """:func:`check_model` of several models, which run in megatron-core one after another in one process.

    Raises:
        ConvertError: As there.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckError(
            "check-model compares with transformers, which is not installed; run: "
            f"{install_hint('slime-convert', 'check')}"
        )
    from slime_convert.check.proofs import prove
    from slime_convert.check.tiny import tiny_config

    configs = [tiny_config(model) for model in models]
    with tempfile.TemporaryDirectory(prefix="slime-convert-check-") as directory:
        return prove(configs, Path(directory), megatron=megatron)
