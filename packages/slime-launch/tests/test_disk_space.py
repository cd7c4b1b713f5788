"""Disks that have no space for what a run writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slime_launch.disk_space import disk_space_notes, written_files
from slime_launch.errors import PreflightError
from slime_launch.flags import parse_train
from slime_launch.preflight import preflight


def test_a_disk_without_room_for_a_checkpoint_is_refused(flags, to_words, tmp_path, monkeypatch):
    """1,000 parameters in fp32: 4 bytes each in the model, 12 in a checkpoint, 4 without the optimizer."""
    model = Path(flags["--hf-checkpoint"])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (model / "model.safetensors").write_bytes(bytes(4000))
    flags["--save"] = str(tmp_path / "save")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=11_999))
    with pytest.raises(PreflightError, match=r"--save .*save has 0.0 GiB free, and one checkpoint takes about 0.0 GiB"):
        preflight(parse_train(to_words(flags)))
    preflight(parse_train([*to_words(flags), "--no-save-optim"]))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_000))
    preflight(parse_train(to_words(flags)))
    more = ["--num-rollout", "10", "--save-interval", "2", "--max-checkpoints-kept", "2"]
    with pytest.raises(PreflightError, match="3 checkpoints take about"):  # two, and one that is being written
        preflight(parse_train([*to_words(flags), *more]))
    (tmp_path / "save" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000004").mkdir()
    preflight(parse_train([*to_words(flags), *more]))
    with pytest.raises(PreflightError, match=r"one checkpoint takes about .*, 5 exports take about"):
        preflight(parse_train([*to_words(flags), *more, "--save-hf", str(tmp_path / "hf-{rollout_id}")]))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_000 + 5 * 4_000))
    preflight(parse_train([*to_words(flags), *more, "--save-hf", str(tmp_path / "hf-{rollout_id}")]))


def test_what_may_fill_a_disk_later_is_noted(flags, to_words, tmp_path, monkeypatch):
    """Rollouts are as long as they may be, so that a run is not refused for them."""
    model = Path(flags["--hf-checkpoint"])
    (model / "model.safetensors").write_bytes(bytes(4000))
    flags |= {"--save": str(tmp_path / "save"), "--dump-details": str(tmp_path / "out"), "--num-rollout": "10"}
    usage, size = shutil.disk_usage(tmp_path), 2_000 * 12
    # Of rollouts and of train data, and rollouts of two intervals in --save: samples, tokens, bytes.
    dumps = 3 * 10 * 4 * 2 * 1024 * 16
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=dumps + 2 * size - 1))
    settings = parse_train([*to_words(flags), "--save-interval", "5"])
    preflight(settings)
    [line] = disk_space_notes(written_files(settings))
    assert "2 checkpoints take about" in line and "10 rollouts take at most" in line
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=dumps + 2 * size))
    assert disk_space_notes(written_files(settings)) == []
