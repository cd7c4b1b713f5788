"""Checkpoints are found, and what is none is named."""

import pytest

from slime_core.errors import ConfigError
from slime_megatron.checkpoints.find import find_checkpoint, reference_source
from slime_megatron.errors import TrainerCheckpointError


def make(directory, backend="torch_dist"):
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(f'{{"sharded_backend": "{backend}"}}')
    (directory / ".metadata").write_bytes(b"")
    (directory / "common.pt").write_bytes(b"")
    return directory


def test_the_newest_a_release_and_one_iteration(tmp_path):
    first, second = make(tmp_path / "run" / "iter_0000003"), make(tmp_path / "run" / "iter_0000012")
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    tracker.write_text("12\n")
    found = find_checkpoint(tmp_path / "run")
    assert (found.directory, found.iteration) == (second, 12)
    assert find_checkpoint(first).iteration == 3
    release = make(tmp_path / "run" / "release")
    tracker.write_text("release")
    found = find_checkpoint(tmp_path / "run")
    assert (found.directory, found.iteration) == (release, None)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(TrainerCheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(TrainerCheckpointError, match="neither latest_checkpointed_iteration"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(TrainerCheckpointError, match="'seven'"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(TrainerCheckpointError, match="iter_0000005"):
        find_checkpoint(tmp_path)
    with pytest.raises(TrainerCheckpointError, match="'zarr' checkpoint"):
        find_checkpoint(make(tmp_path / "other", "zarr"))
    (tmp_path / "other" / "metadata.json").write_text('{"sharded_')
    with pytest.raises(TrainerCheckpointError, match="invalid JSON"):
        find_checkpoint(tmp_path / "other")


def test_the_reference_is_never_a_trained_checkpoint(tmp_path):
    own = make(tmp_path / "run" / "iter_0000003")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    base = make(tmp_path / "base" / "release").parent
    (base / "latest_checkpointed_iteration.txt").write_text("release")
    run = str(tmp_path / "run")
    assert reference_source(None, None, None) is None
    assert reference_source(str(base), None, None) == base
    assert reference_source(str(base), None, own) == base
    assert reference_source(run, str(base), run) == base
    for load in (None, run):
        with pytest.raises(ConfigError, match="--ref-load"):
            reference_source(load, None, own)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"\xcc", b"9" * 999, b"7" * 2000, "٣".encode(), None])
def test_a_damaged_tracker_is_named(tmp_path, content):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    if content is None:
        tracker.mkdir()  # is passed over
    else:
        tracker.write_bytes(content)
    with pytest.raises(TrainerCheckpointError, match=r"latest_checkpointed_iteration.txt"):
        find_checkpoint(tmp_path)


def test_a_description_that_is_nested_too_deeply_is_named(tmp_path):
    (make(tmp_path / "other") / "metadata.json").write_text("[" * 100_000)
    with pytest.raises(TrainerCheckpointError, match=r"invalid JSON .it is nested too deeply"):
        find_checkpoint(tmp_path / "other")
