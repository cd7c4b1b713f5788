"""The proofs of ``check-model``, in the order of their rows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime_convert.check.results import CheckResult, Proof
from slime_convert.check.tiny import TOKENS_BS, TinyModel, build, quiet
from slime_convert.compare import verify
from slime_convert.conversions.from_megatron import megatron_to_hf
from slime_convert.conversions.to_megatron import hf_to_torch_dist
from slime_convert.errors import CheckError, ConvertError
from slime_convert.families import FAMILIES
from slime_convert.shape import ModelShape

TOLERANCE = 1e-4
"""Difference between logits that rounding in float32 explains; a mistake in a table makes one of about 1."""
TIME_LIMIT_S = 600

_PADDING = 16
_NO_CHECKPOINT = "no checkpoint was converted"
_MEGATRON = "slime_convert.check.megatron"


def prove(configs: Sequence[Mapping[str, Any]], directory: Path, *, megatron: bool) -> list[CheckResult]:
    """Prove, in an empty directory, that the tiny models of some ``config.json`` convert.

    A :class:`CheckError` if transformers cannot build one, or the disk is full.
    """
    try:
        with quiet():
            models = [build(config, directory / f"{number}.float32") for number, config in enumerate(configs)]
            rows = [_rows_of_transformers(model) for model in models]
            outcomes = _run_in_megatron(models, directory, wanted=megatron)
    except (OSError, SafetensorError) as error:
        raise CheckError(f"cannot write {directory} ({error}); make room, or set TMPDIR") from error
    return [
        CheckResult(_name(model), (*found, *_rows_of_megatron(outcome)))
        for model, found, outcome in zip(models, rows, outcomes, strict=True)
    ]


def _name(model: TinyModel) -> str:
    shape = model.map.shape
    modules = f" and {shape.mtp_num_layers} for prediction" if shape.mtp_num_layers else ""
    return f"a tiny random {shape.family} model of {shape.num_layers} layers{modules}"


def _rows_of_transformers(model: TinyModel) -> list[Proof]:
    whole, half = model.directory, model.directory.with_suffix(".bfloat16")
    model.save_bfloat16(half)
    rows = [
        _row("there and back, float32", partial(_comes_back, whole)),
        _row("there and back, bfloat16", partial(_comes_back, half)),
    ]
    if not _back(whole).exists():
        return [*rows, Proof("transformers", None, _NO_CHECKPOINT)]
    return [*rows, _row("transformers", partial(_has_same_logits, model))]


def _row(name: str, proof: Callable[[], tuple[bool, str]]) -> Proof:
    try:
        return Proof(name, *proof())
    except Exception as error:  # a mistaken table fails in any way
        kind = "" if isinstance(error, ConvertError) else f"{type(error).__name__}: "
        return Proof(name, False, f"{kind}{error}")


def _converted(origin: Path) -> Path:
    return origin.with_name(f"{origin.name}.torch_dist")


def _back(origin: Path) -> Path:
    return origin.with_name(f"{origin.name}.back")


def _comes_back(origin: Path) -> tuple[bool, str]:
    hf_to_torch_dist(origin, _converted(origin), make_vocab_size_divisible_by=_PADDING)
    megatron_to_hf(_converted(origin), _back(origin), origin)
    for side in (origin, _back(origin)):
        compared = verify(side, _converted(origin))
        if not compared.equal:
            worst = compared.differences[0]
            return False, f"{worst.name}: {worst.kind} ({len(compared.differences)} such weights)"
    given, found = _stored(origin), _stored(_back(origin))
    other = sorted(name for name in given.keys() | found.keys() if given.get(name) != found.get(name))
    if other:
        return False, f"{other[0]} is not the same bit for bit ({len(other)} such weights)"
    return True, f"{len(given)} weights, bit for bit"


def _stored(directory: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Every weight's type, shape and bytes, read by the safetensors library."""
    return {
        name: (tensor.dtype, tensor.shape, bytes(tensor.contiguous().view(torch.uint8).numpy()))
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def _has_same_logits(model: TinyModel) -> tuple[bool, str]:
    before, after = model.logits(), model.loaded_from(_back(model.directory)).logits()
    if torch.equal(before, after):
        return True, f"the same logits, up to {before.abs().max():.1f}"
    return False, f"logits differ by {(before - after).abs().max():.1e}"


def _run_in_megatron(models: Sequence[TinyModel], directory: Path, *, wanted: bool) -> list[dict[str, Any]]:
    """Each model's outcome in Megatron's process: figures, an ``error``, or under ``not run`` why there are none."""
    if not wanted:
        return [{"not run": "left out, as asked"}] * len(models)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return [{"not run": "megatron-core is not installed"}] * len(models)
    jobs, results = directory / "jobs.json", directory / "results.jsonl"
    not_run = [_why_not_run(model) for model in models]
    run = [_job(model) for model, reason in zip(models, not_run, strict=True) if not reason]
    jobs.write_text(json.dumps(run))  # written: a private folder
    results.touch()
    ended = "" if all(not_run) else _run_process(jobs, results)
    found = map(json.loads, results.read_text().splitlines())
    return [{"not run": reason} if reason else next(found, {"error": ended}) for reason in not_run]


def _why_not_run(model: TinyModel) -> str:
    if not _converted(model.directory).exists():
        return _NO_CHECKPOINT
    if not expected_logits(model).abs().max() > 1:
        return "transformers' logits are below 1 or not numbers, and would prove nothing"
    lacks = missing_in_megatron(model.map.shape)
    return f"megatron-core {importlib.metadata.version('megatron-core')} lacks {lacks}" if lacks else ""


def missing_in_megatron(shape: ModelShape) -> str:
    """The parts that stock megatron-core 0.16.1 lacks to run a model on local layers; empty if it has all."""
    llama3 = (shape.rope_low_freq_factor, shape.rope_high_freq_factor, shape.rope_original_max_position_embeddings)
    if shape.use_rope_scaling and llama3 != (1.0, 4.0, 8192):
        return "other constants of Llama 3's rotary scaling than 3.1's"
    return FAMILIES[shape.family].lacks


def expected_logits(model: TinyModel) -> torch.Tensor:
    """The logits, 1 × B × S × V, that Megatron is to compute too."""
    return model.logits()[None]


def _job(model: TinyModel) -> dict[str, Any]:
    expected = model.directory.with_suffix(".logits")
    logits = expected_logits(model).contiguous()
    save_file({"tokens": TOKENS_BS, "logits": logits}, expected)
    return {
        "origin": str(model.directory),
        "checkpoint": str(_converted(model.directory) / "release"),
        "expected": str(expected),
        "padded_vocab_size": model.map.shape.padded_vocab_size(1, _PADDING),
    }


def _run_process(jobs: Path, results: Path) -> str:
    """Run Megatron's process; how it ended."""
    settings = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", _MEGATRON, str(jobs), str(results)],
            cwd=jobs.parent,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"Megatron's process took more than {TIME_LIMIT_S} seconds"
    last = " / ".join(process.stderr.strip().splitlines()[-3:])
    return f"Megatron's process ended with code {process.returncode}: {last}"


def _rows_of_megatron(outcome: Mapping[str, Any]) -> tuple[Proof, Proof]:
    if reason := outcome.get("not run"):
        return Proof("Megatron", None, reason), Proof("export", None, reason)
    if error := outcome.get("error"):
        return Proof("Megatron", False, error), Proof("export", None, "the model did not run in Megatron")
    difference, wrong = outcome["difference"], outcome["wrong"]
    exported = f"{wrong[0]} is not the same ({len(wrong)} such weights)" if wrong else None
    core = importlib.metadata.version("megatron-core")
    return (
        Proof("Megatron", difference <= TOLERANCE, f"megatron-core {core}, logits differ by at most {difference:.1e}"),
        Proof("export", not wrong, exported or f"{outcome['exported']} weights, bit for bit"),
    )
