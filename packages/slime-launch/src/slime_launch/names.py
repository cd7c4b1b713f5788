"""Names that a command may have in place of paths, looked up once: a model on the Hugging Face Hub, SGLang's Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_convert.published import nearest_published, published_config
from slime_core.errors import DataError
from slime_core.files import read_json
from slime_core.flags import collected_problems
from slime_launch.config import Settings
from slime_launch.errors import PreflightError, Problems
from slime_megatron.service import flag_name

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DESCRIPTION = ("*.json", "*.model", "*.txt", "*.jinja")
"""Files of a model that a plan reads: config, tokenizer, chat template, and the index of its weights."""
FILES = (*DESCRIPTION, "*.safetensors")
"""Files of a model that a run reads."""
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TRACKERS = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json")
"""Files by which a directory with weights is known: of such names, or these of a checkpoint."""
CHECKPOINTS = ("load", "ref_load", "critic_load", "opd_teacher_load")
"""Flags of trainers that name a checkpoint, or a model."""


def with_paths(settings: Settings, problems: Problems, *, weights: bool = True) -> Settings:
    """The same settings with paths for names. A Hub's model is taken from the cache, or else downloaded.

    Without ``weights``, which is for plans, what describes a model suffices: the config of a published one will do. One
    that is not in the cache and cannot be downloaded is among the ``problems``, and keeps its name. A ``--load`` that
    is not there yet keeps it, too, where ``--ref-load`` is given, with which the run then begins.
    """
    named, paths = models(settings), dict[str, str]()
    for key, name in named.items():
        if key == "load" and settings.megatron.ref_load not in (None, name):
            with contextlib.suppress(PreflightError):
                paths[name] = local_model(name, flag_name(key), weights=weights)
            paths.setdefault(name, name)
        elif name not in paths:
            found = problems.attempt(local_model, name, flag_name(key), weights=weights)
            paths[name] = found or name
            if found is None:
                problems.settle(name)
    megatron, rollout, engine = settings.megatron, settings.rollout, settings.engine
    with collected_problems():  # what is wrong with the other values is reported by the preflight
        if any(path != name for name, path in paths.items()):
            data = dataclasses.replace(rollout.data, hf_checkpoint=paths[named.pop("hf_checkpoint")])
            rollout = dataclasses.replace(rollout, data=data)
            checkpoints: dict[str, Any] = {key: paths[name] for key, name in named.items()}
            megatron = dataclasses.replace(megatron, **checkpoints)
        if settings.kind.generates and engine.sglang_python is None and not engine.rollout_external_engine_addrs:
            engine = dataclasses.replace(engine, sglang_python=engine.python)
    return dataclasses.replace(settings, rollout=rollout, megatron=megatron, engine=engine)


def models(settings: Settings) -> dict[str, str]:
    """Possible names of models on the Hub, by flag: what the run itself writes is none, though it comes later."""
    megatron, found = settings.megatron, {"hf_checkpoint": settings.rollout.data.hf_checkpoint}
    written = {Path(path).resolve() for path in (megatron.save, megatron.critic_save) if path is not None}
    for key in CHECKPOINTS if settings.kind.trains else ():
        path = getattr(megatron, key)
        if path is not None and Path(path).resolve() not in written:
            found[key] = path
    return found


def absent_models(given: Mapping[str, str], paths: Mapping[str, str]) -> dict[str, str]:
    """The models whose weights are not here, by path: what was ``given``. Both are as of :func:`models`.

    Those are the models that were given by name and are not downloaded, and directories that only describe a model.
    """
    named = {path: given[key] for key, path in paths.items() if path != given[key] and not is_whole(Path(path))}
    return named | {path: path for path in paths.values() if path not in named and _only_describes(Path(path))}


def _only_describes(directory: Path) -> bool:
    """Whether a directory has a model's config, and no file of weights in any format."""
    return (directory / "config.json").is_file() and not any(
        path.suffix in WEIGHTS or path.name in TRACKERS for path in directory.iterdir()
    )


def local_model(name: str, flag: str = "--hf-checkpoint", *, weights: bool = True) -> str:
    """A model's directory: ``name`` itself, unless it has the form ``owner/model`` and no such directory exists.

    Without ``weights`` these are not downloaded, and the config of a published model is taken where there is no other.
    Errors name the ``flag``.

    Raises:
        PreflightError: It is not in the Hub's cache and cannot be downloaded, or is not a directory but like the name
            of a published model.
    """
    if Path(name).exists():
        return name
    if not HUB_NAME.fullmatch(name):
        described = None if weights else _published(name)
        if described is None and (advice := _published_advice(name)):
            advice = f"{advice}, and a run a directory or a name on the Hub"
            raise PreflightError(f"{flag} {name} is not a directory; {advice}")
        return described or name
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
    if not weights and (described := _published(name)):
        return described
    advice = "" if published_config(name) else _published_advice(name)
    raise PreflightError(
        f"{flag} {name} is not a directory, is not complete in the Hub's cache {constants.HF_HUB_CACHE}, "
        f"and cannot be downloaded ({reason}); give a directory, or run `hf download {name}` where there is a network"
        f"{f'; {advice}' if advice else ''}"
    )


def _published_advice(name: str) -> str:
    """Which published model a name may mean, for a plan; empty if none."""
    if published_config(name) is not None:
        return f"a plan takes the published {name.rpartition('/')[2]}"
    near = nearest_published(name)
    return f"did you mean {near}? A plan takes that published name" if near else ""


def is_published(directory: Path) -> bool:
    """Whether all that is here of a model is the config that is published: no tokenizer, and no weights."""
    return directory.parent == Path(_configs().name)


@functools.cache
def _configs() -> tempfile.TemporaryDirectory[str]:
    """Where this process writes configs of published models; removed with it."""
    return tempfile.TemporaryDirectory(prefix="slime-published-")


def _published(name: str) -> str | None:
    """A directory with the config of a published model; ``None`` for a name that is not one's."""
    config = published_config(name)
    if config is None:
        return None
    directory = Path(_configs().name) / name.rpartition("/")[2]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")  # written: a private folder
    return str(directory)


def stored_bytes(model: Path) -> int:
    """Bytes of a model's files of weights; of those that were not downloaded what its index says."""
    found = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if (model / INDEX).is_file() and not is_whole(model):
        try:
            return int(read_json(model / INDEX)["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError, OverflowError, DataError):  # cut off, or an index without sizes
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
            files = set(map(str, read_json(index)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, DataError):  # a download that was cut off
            return False
        weights = all((directory / file).is_file() for file in files)
    else:
        weights = any(directory.glob("*.safetensors"))
    return weights and (directory / "config.json").is_file()
