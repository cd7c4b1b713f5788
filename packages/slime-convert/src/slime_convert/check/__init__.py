"""``check-model``: that models like a given one convert, proven on a tiny random one.

From any ``config.json``: transformers = there and back = megatron-core = export. Importing this loads neither torch nor
transformers, and Megatron runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import CheckError
from slime_convert.extras import install_hint
from slime_convert.progress import aligned


@dataclass(frozen=True)
class Row:
    """One proof.

    Attributes:
        name: What is proven.
        passed: Whether it holds; ``None`` if it was not tried.
        detail: A figure, or the reason.
    """

    name: str
    passed: bool | None
    detail: str

    @property
    def outcome(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        return "not run" if self.passed is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class CheckResult:
    """What the check of a model found.

    Attributes:
        model: The tiny model in a few words.
        rows: The proofs.
    """

    model: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether no proof failed; one that was not tried does not count."""
        return all(row.passed is not False for row in self.rows)

    def to_text(self) -> str:
        """A table for people; its last line is ``passed`` or ``failed``."""
        table = aligned([(row.name, row.outcome, row.detail) for row in self.rows])
        return f"{self.model}\n\n{table}\n\n{'passed' if self.passed else 'failed'}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [{"name": row.name, "outcome": row.outcome, "detail": row.detail} for row in self.rows]
        return {"passed": self.passed, "model": self.model, "rows": rows}


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
