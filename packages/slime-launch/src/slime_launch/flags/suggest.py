"""What a mistyped flag was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection

ELSEWHERE = {
    "--beta": "--kl-loss-coef",
    "--dataset-name": "--prompt-data",
    "--epsilon": "--eps-clip",
    "--epsilon-high": "--eps-clip-high",
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--lr-decay-style",
    "--max-completion-length": "--rollout-max-response-len",
    "--max-grad-norm": "--clip-grad",
    "--max-new-tokens": "--rollout-max-response-len",
    "--max-prompt-length": "--rollout-max-prompt-len",
    "--max-steps": "--num-rollout",
    "--model": "--hf-checkpoint",
    "--model-name-or-path": "--hf-checkpoint",
    "--model-path": "--hf-checkpoint",
    "--num-generations": "--n-samples-per-prompt",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--reward-funcs": "--custom-rm-path",
    "--save-steps": "--save-interval",
    "--temperature": "--rollout-temperature",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--tp": "--tensor-model-parallel-size",
}
"""Flags of TRL, Transformers, vLLM and SGLang, and ours of the same meaning."""

_CUTOFF = 0.75


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known flag closest to ``name``, or ``None`` if none is close.

    Args:
        name: As typed, such as ``--num-rolout``.
        known: The flags that exist.
    """
    if name.replace("_", "-") in known:
        return name.replace("_", "-")
    if ELSEWHERE.get(name.replace("_", "-")) in known:
        return ELSEWHERE[name.replace("_", "-")]
    matches = difflib.get_close_matches(name, known, n=1, cutoff=_CUTOFF)
    return matches[0] if matches else None


def unknown_flag(name: str, known: Collection[str]) -> str:
    """The line that tells somebody about a flag that does not exist."""
    guess = nearest(name, known)
    return f"unknown flag {name}; did you mean {guess}?" if guess else f"unknown flag {name}; see --help"
