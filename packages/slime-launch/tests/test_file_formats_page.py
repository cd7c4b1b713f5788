"""The tables of docs/reference/file-formats.md against files that the code writes, and the keys that it takes."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from slime_core.types import RolloutBatch, Sample, Status, TrainSample, TrainShard, TrainStep
from slime_launch import overrides
from slime_launch.flags import parse_train
from slime_launch.manifest import Manifest, write_manifest
from slime_launch.preflight import Checked
from slime_launch.report import Report, make_report, write_report
from slime_launch.resolved import FILE_NAME, write_resolved
from slime_launch.resume import StartWeights
from slime_launch.tracking import Tracker, read_rows
from slime_megatron.checkpoints.peft import write_adapter
from slime_megatron.settings.trained import Lora
from slime_megatron.step import debugging
from slime_rollout.data import offline
from slime_rollout.engine.topology_plan import ServedModel, ServerGroup
from slime_rollout.eval_sets import KEYS
from slime_rollout.weights.checkpoint import CheckpointWriter
from slime_rollout.weights.disk import DELTA_INDEX, DeltaWriter, TensorDelta

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "file-formats.md"
if not PAGE.is_file():
    pytest.skip("outside the repository", allow_module_level=True)


def _tables(title):
    """The tables of a section, each a list of rows of cells."""
    section = re.split(rf"^#+ {re.escape(title)}$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1]
    section = re.split(r"^#+ ", section, flags=re.M)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", section, flags=re.M)
    return [
        [[cell.strip() for cell in row.strip("|").split(" | ")] for row in block.split("\n")[2:-1]] for block in blocks
    ]


def _keys(title, table=0):
    return {name for row in _tables(title)[table] for name in re.findall(r"`([^`]+)`", row[0])}


def _entries(path, table):
    """Types and shapes in an archive, held to those of a table; returns its head."""
    with np.load(path, allow_pickle=False) as file:
        names = {name for name in file.files if name != "head" and not name.endswith(".lengths")}
        assert names == {row[0].strip("`") for row in table}
        for name, kind, shape, _ in ([cell.strip("`") for cell in row] for row in table):
            assert file[name].dtype == kind, name
            assert (f"{name}.lengths" in file.files) == shape.startswith("rows"), name
            if shape.startswith("rows"):
                assert file[f"{name}.lengths"].dtype == np.int64
        return json.loads(file["head"].tobytes())


def test_a_rollout(tmp_path):
    sample = Sample(index=0, group_index=0, prompt="a", tokens=[1, 2], response_length=1, response="b", reward=1.0)
    sample.status, sample.rollout_log_probs, sample.teacher_log_probs = Status.COMPLETED, [-0.5], [-0.5]
    sample.loss_mask, sample.weight_versions = [1], [0]
    sample.kept_tokens, sample.routed_experts = "2 5;", "2x1:AAE="
    RolloutBatch(rollout_id=0, groups=[[sample]]).columns().write(tmp_path / "rollout.npz")
    head, entries = _tables("Rollouts")
    assert _entries(tmp_path / "rollout.npz", entries).keys() == _keys("Rollouts") and head


def test_train_data(tmp_path):
    one = np.array([0.5], np.float32)
    sample = TrainSample(
        index=0, group_index=0, tokens=np.array([1, 2], np.int32), response_length=1, loss_mask=np.array([1], np.uint8),
        trajectory_tokens=1, reward=1.0, raw_reward=1.0, rollout_log_probs=one, teacher_log_probs=one,
    )  # fmt: skip
    step = TrainStep(micro_batches=[[0]], global_trajectories=1, global_tokens=1)
    shard = TrainShard.of(rollout_id=0, temperature=1.0, samples=[sample], steps=[step])
    shard.write(tmp_path / "train.npz")
    head, entries = _tables("Train data")
    found = _entries(tmp_path / "train.npz", entries)
    assert found.keys() == _keys("Train data")
    assert found["steps"][0].keys() <= set(re.findall(r"`(\w+)`", " ".join(map(" ".join, head))))
    text = PAGE.read_text(encoding="utf-8").partition("The trainer adds")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`", text) == list(debugging.COMPUTED)


def test_settings(flags, to_words, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    for own in (sys.executable, str(tmp_path / "python")):
        checked = Checked(
            settings=parse_train([*to_words(flags), "--sglang-python", own]), shape=None, manifest=None,
            weights=StartWeights(load="l", ref_load="r"), overrides={}, topology=None, num_engines=1,
        )  # fmt: skip
        write_resolved(checked, tmp_path)
        written = json.loads((tmp_path / FILE_NAME).read_text())
        assert written.keys() == _keys("settings.json") - ({"engine_packages"} if own == sys.executable else set())
    assert written["settings"]["lr"].keys() == {"value", "origin"}


def test_what_a_run_reports(tmp_path):
    tracker = Tracker(tmp_path, tensorboard=False)
    example = {"prompt": "a", "response": "b", "reward": 1.0}
    tracker.log("rollout", step=0, rollout_id=0, metrics={"rollout/raw_reward": 1.0}, samples=[example])
    tracker.close()
    (row,) = read_rows(tmp_path)
    assert row.keys() - {"rollout/raw_reward"} == _keys("metrics.jsonl") & row.keys()
    assert {"kind", "step", "rollout_id", "time", "samples"} == _keys("metrics.jsonl") & row.keys()
    write_report(make_report([row], output_dir=tmp_path, checkpoint=None, minutes=1.0))
    written = json.loads((tmp_path / "report.json").read_text())
    assert written.keys() == {field.name for field in dataclasses.fields(Report)}
    assert written.keys() == {name for row in _tables("report.json")[0] for name in re.findall(r"`(\w+)`", row[0])}


def test_a_manifest(tmp_path):
    given = dict.fromkeys((field.name for field in dataclasses.fields(Manifest)), None)
    write_manifest(tmp_path, Manifest(**given))
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert written.keys() == _keys("manifest.json")
    assert str(written["format_version"]) in _tables("manifest.json")[0][0][1]


def test_an_adapter(tmp_path):
    write_adapter(tmp_path, {"model.q_proj.lora_A.weight": torch.ones(1, 1)}, Lora(1, 1.0, ("q_proj",)))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written.keys() == _keys("Checkpoints", 1)


def test_weights_in_files(tmp_path):
    (tmp_path / "template").mkdir()
    writer = CheckpointWriter(tmp_path / "weight_v000001", tmp_path / "template", 1)
    writer.add([("a", torch.ones(1))])
    directory = writer.finish()
    written = json.loads((directory / "slime_weights.json").read_text())
    assert written.keys() == _keys("Weights in files", 0)
    delta = DeltaWriter(tmp_path / "weight_v000002")
    delta.add("a", torch.ones(1), torch.zeros(1))
    delta.finish(2, 1, {"a": "0"}, {"a": "1"})
    _, _, text = (tmp_path / "weight_v000002" / DELTA_INDEX).read_bytes().partition(b"\n")
    index = json.loads(text)
    assert index.keys() == _keys("Weights in files", 1)
    assert index["tensors"]["a"].keys() == _keys("Weights in files", 2) == set(TensorDelta.__struct_fields__)


def test_keys_of_files_that_are_given():
    assert _keys("Held-out sets") - {"name", "path", "top_k: -1", "defaults"} == KEYS.keys() - {"name", "path"}
    models = {field.encode_name for field in msgspec.structs.fields(ServedModel)}
    assert _keys("Several models", 0) == models
    assert _keys("Several models", 1) == {field.encode_name for field in msgspec.structs.fields(ServerGroup)}
    assert _keys("Settings of a role") == overrides.KEYS
    assert _keys("Preference pairs") == {"prompt", "chosen", "rejected", "margin"}
    others = {name for row in _tables("Preference pairs")[0] for name in re.findall(r"`(\w+)`", row[1])}
    usual = {*offline._PROMPT_KEYS, *offline._CHOSEN_KEYS, *offline._REJECTED_KEYS}
    assert others == usual - {"prompt", "chosen", "rejected"}
