import dataclasses

import pytest

from slime_core.types import RolloutBatch, Sample
from slime_launch.errors import ManifestError
from slime_launch.flags.command import parse_train
from slime_launch.flags.settings import free_flags
from slime_launch.resume import RunState, changed_flags, find_run
from slime_launch.weights import StartWeights
from slime_rollout.engine.config import EngineConfig

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
    return RunState(settings, find_run(settings), WEIGHTS, output_dir=workspace / "out")


def checkpoint(workspace, iteration):
    directory = workspace / "save" / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    return directory


def test_a_new_run_can_be_continued_before_its_first_checkpoint(settings, workspace):
    state = start(settings(), workspace)
    state.begin({"position": 0})
    state.write_down(batch(0))
    again = start(settings(), workspace)
    assert (again.iteration, again.source_state, again.resume_from) == (0, {"position": 0}, None)
    assert again.written_down(0) == batch(0)
    assert again.written_down(1) is None


def test_it_continues_from_the_manifest_and_not_from_later_directories(settings, workspace):
    state = start(settings(num_rollout=9, save_interval=2), workspace)
    state.begin({"position": 0})
    for rollout_id in range(2):
        state.write_down(batch(rollout_id), {"position": rollout_id + 1})
        state.trained(batch(rollout_id), 2 * rollout_id)
        assert state.save_due == (rollout_id == 1)
    state.commit(checkpoint(workspace, 2), {"position": 2})
    assert not state.save_due
    state.write_down(batch(2), {"position": 3})
    checkpoint(workspace, 4)  # of a save that was never committed
    again = start(settings(num_rollout=9, save_interval=2), workspace)
    assert (again.iteration, again.weight_version) == (2, 2)
    assert again.resume_from == workspace / "save" / "iter_0000002"
    assert again.source_state == {"position": 2}
    assert again.written_down(2) == batch(2)
    assert again.source_state_after(2) == {"position": 3}
    assert sorted(path.name for path in (workspace / "save" / "rollouts").iterdir()) == [
        "rollout_0000002.jsonl", "source_0000002.json"
    ]  # fmt: skip
    assert again.written_down(1) is None  # trained on before the checkpoint, so no longer needed


def test_the_end_is_saved_without_an_interval(settings, workspace):
    state = start(settings(num_rollout=2), workspace)
    state.begin({})
    state.trained(batch(0), 1)
    assert not state.save_due
    state.trained(batch(1), 2)
    assert state.save_due


def test_rollouts_are_kept_on_request(flags, to_words, workspace):
    settings = parse_train([*to_words(flags), "--keep-rollouts"])
    state = start(settings, workspace)
    state.begin({})
    state.write_down(batch(0))
    state.trained(batch(0), 1)
    state.commit(checkpoint(workspace, 1), {})
    assert state.written_down(0) == batch(0)


def test_without_save_nothing_is_written(flags, to_words, workspace):
    del flags["--save"]
    settings = parse_train(to_words(flags))
    state = start(settings, workspace)
    state.begin({})
    state.write_down(batch(0))
    state.trained(batch(0), 1)
    assert not state.save_due
    assert state.written_down(0) is None
    assert not (workspace / "out").exists()
    assert not (workspace / "save").exists()


def test_another_run_is_refused_and_a_longer_one_is_not(settings, workspace):
    start(settings(), workspace).begin({})
    assert find_run(settings(num_rollout=99, micro_batch_size=2)).iteration == 0
    with pytest.raises(ManifestError, match=r"--lr 1e-06 → 0.5, --rollout-temperature 1.0 → 0.7"):
        find_run(settings(lr=0.5, rollout_temperature=0.7))


def test_a_moved_run_is_found(settings, workspace):
    state = start(settings(num_rollout=1), workspace)
    state.begin({})
    state.trained(batch(0), 1)
    state.commit(checkpoint(workspace, 1), {})
    (workspace / "save").rename(workspace / "moved")
    moved = settings(num_rollout=1, save=workspace / "moved")
    assert start(moved, workspace).resume_from == workspace / "moved" / "iter_0000001"


def test_rollouts_without_a_manifest_are_refused(settings, workspace):
    state = start(settings(), workspace)
    state.begin({})
    state.write_down(batch(0))
    (workspace / "save" / "manifest.json").unlink()
    with pytest.raises(ManifestError, match=r"whose manifest.json is gone"):
        find_run(settings())


def test_how_engines_run_and_are_replaced_may_differ():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {name for name in names if not name.startswith("sglang_")} <= free_flags()


def test_flags_that_came_or_went_are_differences():
    assert changed_flags({"lr": 1.0, "old": 1}, {"lr": 1.0, "new": 2}) == ["--new None → 2", "--old 1 → None"]
    assert changed_flags({"sglang_x": "1", "num_rollout": 1}, {"num_rollout": 2}) == []
