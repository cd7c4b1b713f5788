"""Names that a command may have in place of paths, looked up once: a model on the Hugging Face Hub, SGLang's Python."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from slime_core.flags import collected_problems
from slime_launch.config import Settings
from slime_launch.errors import PreflightError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja")
"""What a plan reads of a model: config, tokenizer, chat template, and the index of its weights."""
FILES = (*DESCRIPTION, "*.safetensors")
"""What a run reads of a model."""
INDEX = "model.safetensors.index.json"


def with_paths(settings: Settings, *, weights: bool = True) -> Settings:
    """The same settings with paths for names. A Hub's model is taken from the cache, or else downloaded.

    Without ``weights`` what describes the model suffices.

    Raises:
        PreflightError: The model is not in the cache and cannot be downloaded.
    """
    name = settings.rollout.data.hf_checkpoint
    path = local_model(name, weights=weights)
    megatron, rollout, engine = settings.megatron, settings.rollout, settings.engine
    with collected_problems():  # what is wrong with the other values is reported by the preflight
        if path != name:
            same: dict[str, Any] = {key: path for key in ("load", "ref_load") if getattr(megatron, key) == name}
            megatron = dataclasses.replace(megatron, **same)
            rollout = dataclasses.replace(rollout, data=dataclasses.replace(rollout.data, hf_checkpoint=path))
        if settings.generates and engine.sglang_python is None and not engine.rollout_external_engine_addrs:
            engine = dataclasses.replace(engine, sglang_python=engine.python)
    return dataclasses.replace(settings, rollout=rollout, megatron=megatron, engine=engine)


def local_model(name: str, *, weights: bool = True) -> str:
    """A model's directory: ``name`` itself, unless it has the form ``owner/model`` and no such directory exists.

    Without ``weights`` these are not downloaded.

    Raises:
        PreflightError: It is not in the Hub's cache and cannot be downloaded.
    """
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return name
    from huggingface_hub import constants, snapshot_download

    reason = "it lacks files"
    for only_cached in (True, False):
        try:
            files = list(FILES if weights else DESCRIPTION)
            found = snapshot_download(name, allow_patterns=files, local_files_only=only_cached)
        except Exception as error:  # not in the cache, offline, no such model, a gated one, a full disk
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            if is_whole(Path(found)) or (not weights and _is_described(Path(found), downloaded=not only_cached)):
                return found
    raise PreflightError(
        f"--hf-checkpoint {name} is not a directory, is not complete in the Hub's cache {constants.HF_HUB_CACHE}, "
        f"and cannot be downloaded ({reason}); give a directory, or run `hf download {name}` where there is a network"
    )


def stored_bytes(model: Path) -> int:
    """Bytes of a model's files of weights; of those that were not downloaded what its index says."""
    found = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if (model / INDEX).is_file() and not is_whole(model):
        try:
            return int(json.loads((model / INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError):  # a file that was cut off, or an index without sizes
            pass
    return found


def _is_described(directory: Path, *, downloaded: bool) -> bool:
    """Whether a plan finds what it reads. Only a download shows that a model on the Hub has no index."""
    return (directory / "config.json").is_file() and (downloaded or (directory / INDEX).is_file())


def is_whole(directory: Path) -> bool:
    """Whether a model's directory has its config, and every file of weights that its index names."""
    index = directory / INDEX
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):  # a download that was cut off
            return False
        weights = all((directory / file).is_file() for file in files)
    else:
        weights = any(directory.glob("*.safetensors"))
    return weights and (directory / "config.json").is_file()
