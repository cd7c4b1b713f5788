"""The weights that a run begins with stay what they were, whatever is written beside them later."""

import json
import shutil

import pytest

from slime_core.errors import ConfigError
from slime_core.types import RolloutBatch, Sample
from slime_launch.errors import ManifestError
from slime_launch.flags.command import parse_train
from slime_launch.preflight import preflight
from slime_launch.resume import RunState
from slime_megatron.errors import CheckpointError


def add_checkpoint(root, iteration):
    """What a trainer writes: a checkpoint and the file that names the newest."""
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (directory / ".metadata").write_bytes(b"")
    (directory / "common.pt").write_bytes(b"")
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
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2], response_length=1, reward=1.0)
    state.trained(RolloutBatch(rollout_id=iteration - 1, groups=[[sample]]), iteration)
    state.commit(add_checkpoint(workspace / "save", iteration), {})


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
    state.trained(RolloutBatch(rollout_id=0, groups=[]), 1)
    state.commit(add_checkpoint(workspace / "dist", 1), {})
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
    with pytest.raises(CheckpointError, match="dist/release does not exist"):
        check(flags)


def test_weights_must_come_from_somewhere(check, flags):
    flags.pop("--load", None)
    flags.pop("--ref-load", None)
    with pytest.raises(ConfigError, match="no weights to start from: give --load DIR"):
        check(flags)
