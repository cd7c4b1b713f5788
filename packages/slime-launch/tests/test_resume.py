import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.metadata import Metadata

from slime_core.types import RolloutBatch, Sample
from slime_launch.config import free_flags
from slime_launch.errors import ManifestError, RunError
from slime_launch.flags import parse_train
from slime_launch.preflight import preflight
from slime_launch.resume import RunState, StartWeights, changed_flags, find_run, start_notes, start_weights
from slime_megatron.errors import TrainerCheckpointError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.store import RolloutStore

WEIGHTS = StartWeights(load="dist/release", ref_load="dist/release")


@pytest.fixture
def settings(flags, to_words):
    def make(**changed):
        return parse_train(to_words(flags | {"--" + k.replace("_", "-"): str(v) for k, v in changed.items()}))

    return make


def batch(rollout_id: int) -> RolloutBatch:
    sample = Sample(index=rollout_id, group_index=0, prompt="p", tokens=[1, 2], response_length=1, reward=1.0)
    return RolloutBatch(rollout_id=rollout_id, groups=[[sample]], weight_version=2 * rollout_id)


def start(settings, workspace):
    return RunState(settings, found_run(settings), WEIGHTS, output_dir=workspace / "out")


def found_run(settings):
    return find_run(settings.megatron.save, settings.public_flags())


def checkpoint(workspace, iteration):
    directory = workspace / "save" / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    return directory


def test_the_weights_may_be_a_hugging_face_model(settings, workspace):
    model = workspace / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"w": np.zeros(2, np.float32)}, model / "model.safetensors")
    found = start_weights(settings(load=model), None)
    assert found == StartWeights(load=str(model.resolve()), ref_load=str(model.resolve()))
    (model / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(TrainerCheckpointError, match="cannot read"):
        start_weights(settings(load=model), None)


def test_the_reference_may_be_an_earlier_checkpoint(settings, workspace):
    for iteration in (3, 5):
        directory = workspace / "ref" / f"iter_{iteration:07d}"
        shutil.copytree(workspace / "dist" / "release", directory)
    (workspace / "ref" / "latest_checkpointed_iteration.txt").write_text("5")
    given = {"ref_load": workspace / "ref"}
    assert start_weights(settings(**given), None).ref_load.endswith("iter_0000005")
    assert start_weights(settings(**given, ref_ckpt_step=3), None).ref_load.endswith("iter_0000003")
    with pytest.raises(TrainerCheckpointError, match="iter_0000004"):
        start_weights(settings(**given, ref_ckpt_step=4), None)


def test_an_evaluation_alone_knows_what_it_is_of(settings, workspace):
    """The newest checkpoint of a directory or the one that is named, with its step; a model has none."""
    root = workspace / "trained"
    for iteration in (3, 5):
        shutil.copytree(workspace / "dist" / "release", root / f"iter_{iteration:07d}")
    (root / "latest_checkpointed_iteration.txt").write_text("5")

    def found(load, **more):
        given = settings(load=load, num_rollout=0, eval_prompt_data="held", **more)
        state = RunState(given, None, start_weights(given, None), output_dir=workspace / "out")
        return state.trained_steps, state.evaluated

    assert found(root) == (5, f"{root}/iter_0000005, after step 5")
    assert found(root / "iter_0000003") == (3, f"{root}/iter_0000003, after step 3")
    assert found(workspace / "dist") == (0, str(workspace / "dist" / "release"))
    given = settings(load=root)  # a run that trains begins at step 0, whatever its weights are of
    state = RunState(given, None, start_weights(given, None), output_dir=workspace / "out")
    assert (state.trained_steps, state.evaluated) == (0, None)


def test_a_new_run_can_be_continued_before_its_first_checkpoint(settings, workspace):
    state = start(settings(), workspace)
    state.begin({"position": 0})
    state.store.write(batch(0).columns())
    again = start(settings(), workspace)
    assert (again.iteration, again.source_state, again.resume_from) == (0, {"position": 0}, None)
    assert again.is_written_down(0) and again.store.read(0).batch() == batch(0)
    assert not again.is_written_down(1)


def test_it_continues_from_the_manifest_and_not_from_later_directories(settings, workspace):
    state = start(settings(num_rollout=9, save_interval=2), workspace)
    state.begin({"position": 0})
    for rollout_id in range(2):
        state.store.write(batch(rollout_id).columns(), {"position": rollout_id + 1})
        state.trained(rollout_id)
        assert state.due.save == (rollout_id == 1)
    state.saving(checkpoint(workspace, 2), {"position": 2})
    state.commit()
    assert not state.due.save
    state.store.write(batch(2).columns(), {"position": 3})
    checkpoint(workspace, 4)  # of a save that was never committed
    again = start(settings(num_rollout=9, save_interval=2), workspace)
    assert (again.iteration, again.weight_version) == (2, 2)
    assert again.resume_from == workspace / "save" / "iter_0000002"
    assert again.source_state == {"position": 2}
    assert again.is_written_down(2) and again.store.read(2).batch() == batch(2)
    assert again.store.read_source_state(2) == {"position": 3}
    assert again.store.ids() == [0, 1, 2]  # those since the beginning, from which a replay would start


def written(state):
    """Rollouts that are there after six of them, with a checkpoint after every second."""
    seen = []
    for rollout_id in range(6):
        state.store.write(batch(rollout_id).columns(), {"position": rollout_id + 1})
        state.trained(rollout_id)
        if state.due.save:
            state.saving(Path(f"{state._save}/iter_{rollout_id + 1:07d}"), {})
            state.commit()
            seen.append(state.store.ids())
    return seen


def test_rollouts_since_the_checkpoint_before_the_last_stay_for_a_replay(settings, workspace):
    """So the last interval can be trained on again: at most two intervals are there, with the states of the data."""
    state = start(settings(num_rollout=6, save_interval=2), workspace)
    state.begin({})
    assert written(state) == [[0, 1], [2, 3], [4, 5]]
    states = sorted(path.name for path in (workspace / "save" / "rollouts").glob("source_*"))
    assert states == ["source_0000004.json", "source_0000005.json"]


def test_rollouts_without_a_checkpoint_before_them_do_not_stay(settings, workspace):
    state = start(settings(num_rollout=6, save_interval=2, max_checkpoints_kept=1), workspace)
    state.begin({})
    assert written(state) == [[0, 1], [], []]


def test_the_end_is_saved_without_an_interval(settings, workspace):
    state = start(settings(num_rollout=2), workspace)
    state.begin({})
    state.trained(0)
    assert not state.due.save
    state.trained(1)
    assert state.due.save


def test_rollouts_are_kept_on_request(flags, to_words, workspace):
    settings = parse_train([*to_words(flags), "--keep-rollouts"])
    state = start(settings, workspace)
    state.begin({})
    state.store.write(batch(0).columns())
    state.trained(0)
    state.saving(checkpoint(workspace, 1), {})
    state.commit()
    assert state.is_written_down(0) and state.store.read(0).batch() == batch(0)


def test_without_save_they_are_kept_beside_the_outputs(flags, to_words, workspace):
    del flags["--save"]
    state = start(parse_train([*to_words(flags), "--keep-rollouts"]), workspace)
    state.begin({})
    state.store.write(batch(0).columns())
    state.trained(0)
    assert RolloutStore(workspace / "out" / "rollouts").read(0).batch() == batch(0)


def test_without_save_nothing_is_written(flags, to_words, workspace):
    del flags["--save"]
    settings = parse_train(to_words(flags))
    state = start(settings, workspace)
    state.begin({})
    assert state.store is None
    state.trained(0)
    assert not state.due.save
    assert not state.is_written_down(0)
    assert not (workspace / "out").exists()
    assert not (workspace / "save").exists()


def test_another_run_is_refused_and_a_longer_one_is_not(settings, workspace):
    start(settings(), workspace).begin({})
    assert found_run(settings(num_rollout=99, micro_batch_size=2)).iteration == 0
    with pytest.raises(ManifestError, match=r"--lr 1e-06 → 0.5, --rollout-temperature 1.0 → 0.7"):
        found_run(settings(lr=0.5, rollout_temperature=0.7))


def test_a_moved_run_is_found(settings, workspace):
    state = start(settings(num_rollout=1), workspace)
    state.begin({})
    state.trained(0)
    state.saving(checkpoint(workspace, 1), {})
    state.commit()
    (workspace / "save").rename(workspace / "moved")
    moved = settings(num_rollout=1, save=workspace / "moved")
    assert start(moved, workspace).resume_from == workspace / "moved" / "iter_0000001"


def test_rollouts_without_a_manifest_are_refused(settings, workspace):
    state = start(settings(), workspace)
    state.begin({})
    state.store.write(batch(0).columns())
    (workspace / "save" / "manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"whose manifest.json is gone"):
        found_run(settings())


def test_how_engines_run_and_are_replaced_may_differ():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    no_flags = {"router_args", "own_key", "template"}
    assert {name for name in names if not name.startswith("sglang_")} - no_flags <= free_flags()


def test_flags_that_came_or_went_are_differences():
    assert changed_flags({"lr": 1.0, "old": 1}, {"lr": 1.0, "new": 2}) == ["--new None → 2", "--old 1 → None"]
    assert changed_flags({"sglang_x": "1", "num_rollout": 1}, {"num_rollout": 2}) == []


def add_checkpoint(root, iteration):
    """What a trainer writes: a checkpoint and the file that names the newest."""
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    torch.save({"args": {}}, directory / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return directory


@pytest.fixture
def check(to_words):
    return lambda flags: preflight(parse_train(to_words(flags)))


def begin(checked, workspace):
    state = RunState(checked.settings, checked.manifest, checked.weights, output_dir=workspace / "out")
    state.begin({"position": 0})
    return state


def train_to(state, workspace, iteration):
    state.trained(iteration - 1)
    state.saving(add_checkpoint(workspace / "save", iteration), {})
    state.commit()


VARIANTS = {
    "load": {"--load": "dist"},
    "reference only": {"--ref-load": "dist"},
    "load is save": {"--load": "save", "--ref-load": "dist"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_command_continues(check, flags, workspace, variant):
    del flags["--load"]
    flags |= {name: str(workspace / value) for name, value in VARIANTS[variant].items()}
    release = str(workspace / "dist" / "release")
    first = check(flags)
    assert (first.weights.load, first.weights.ref_load) == (release, release)
    state = begin(first, workspace)
    assert check(flags).weights == first.weights  # killed before its first checkpoint
    add_checkpoint(workspace / "save", 1)  # killed between the checkpoint and the manifest
    again = check(flags)
    assert (again.weights, again.manifest.checkpoint) == (first.weights, None)
    shutil.rmtree(workspace / "save" / "iter_0000001")
    train_to(state, workspace, 1)
    assert check(flags).weights == first.weights


def test_checkpoints_beside_the_converted_model_do_not_become_the_reference(check, flags, workspace):
    flags |= {"--load": str(workspace / "dist"), "--save": str(workspace / "dist"), "--use-kl-loss": None}
    first = check(flags)
    state = begin(first, workspace)
    state.trained(0)
    state.saving(add_checkpoint(workspace / "dist", 1), {})
    state.commit()
    assert check(flags).weights == first.weights
    assert first.weights.ref_load == str(workspace / "dist" / "release")


def test_an_empty_directory_to_load_and_save_is_a_new_run(check, flags, workspace):
    (workspace / "save").mkdir()
    flags |= {"--load": str(workspace / "save"), "--ref-load": str(workspace / "dist")}
    assert check(flags).weights.load == str(workspace / "dist" / "release")


def test_what_is_no_longer_needed_may_be_gone(check, flags, workspace):
    train_to(begin(check(flags), workspace), workspace, 1)
    shutil.rmtree(workspace / "dist")
    assert check(flags).manifest.iteration == 1
    flags["--use-kl-loss"] = None
    with pytest.raises(ManifestError, match="--use-kl-loss False → True"):
        check(flags)


def test_a_reference_that_is_gone_is_named(check, flags, workspace):
    flags["--use-kl-loss"] = None
    train_to(begin(check(flags), workspace), workspace, 1)
    shutil.rmtree(workspace / "dist")
    with pytest.raises(TrainerCheckpointError, match="dist/release does not exist"):
        check(flags)


@pytest.mark.parametrize(("ref_load", "flag"), [(True, "--ref-load"), (False, "--hf-checkpoint")])
def test_without_load_a_run_begins_with_the_reference_or_else_the_engines_model_and_says_so(
    check, flags, workspace, ref_load, flag
):
    save_file({"weight": np.zeros(8, np.float32)}, workspace / "hf" / "model.safetensors")
    dist = flags.pop("--load")
    if ref_load:
        flags["--ref-load"] = dist
    checked = check(flags)
    begins = str((workspace / ("dist/release" if ref_load else "hf")).resolve())
    assert checked.weights == StartWeights(load=begins, ref_load=begins)
    notes = start_notes(checked.settings.megatron, checked.manifest, checked.weights)
    assert notes == [f"--load is not given, so the run begins with {flag} {begins}"]
    megatron = check(flags | {"--load": dist}).settings.megatron
    assert start_notes(megatron, None, StartWeights(load=dist, ref_load=dist)) == []


def test_only_the_newest_checkpoints_are_kept_and_what_the_run_began_with(settings, workspace):
    given = settings(num_rollout=9, max_checkpoints_kept=2)
    first = checkpoint(workspace, 1)
    weights = StartWeights(load=str(first), ref_load=str(first))
    state = RunState(given, None, weights, output_dir=workspace / "out")
    for iteration in (2, 3, 4, 5):
        (workspace / "save" / "old_actor" / "1" / f"iter_{iteration:07d}").mkdir(parents=True)
        state.trained(iteration - 1)
        state.saving(checkpoint(workspace, iteration), {})
        state.commit()
        state.drop_oldest()
    checkpoint(workspace, 6)  # is being written
    state.drop_oldest()
    assert sorted(path.name[-1] for path in (workspace / "save").glob("iter_*")) == ["1", "4", "5", "6"]
    assert sorted(path.name[-1] for path in (workspace / "save").glob("old_actor/1/iter_*")) == ["4", "5"]


def test_an_export_that_fails_is_a_failure_of_the_run_and_one_that_is_missing_is_made_up_for(settings, workspace):
    given = settings(save_hf=str(workspace / "hf-{rollout_id}"))
    state = RunState(given, None, WEIGHTS, output_dir=workspace / "out")
    assert state.is_exported  # there is nothing to export
    state.trained(0)
    state.saving(checkpoint(workspace, 1), {})
    state.commit()
    assert not state.is_exported
    with pytest.raises(RunError, match=r"--save-hf .*hf-0 could not be written"):
        state.export()
    (workspace / "hf-0").mkdir()
    assert state.is_exported
