"""What a run says at first, and how its parts stop. What it does with real parts is in `integration_tests`."""

import contextlib
import dataclasses

import pytest

import slime_launch.run
from slime_launch.errors import Stopped
from slime_launch.flags import parse_train
from slime_launch.manifest import Manifest
from slime_launch.preflight import Checked
from slime_launch.resume import RunState, StartWeights
from slime_launch.run import opening_lines, stop_all


def test_what_cannot_be_stopped_hides_neither_the_cause_nor_the_rest(capsys):
    stopped = []

    def fail():
        raise ValueError("the actor is gone")

    with pytest.raises(Stopped), contextlib.ExitStack() as stack:
        stack.callback(stopped.append, "first")
        stack.callback(fail)
        stack.callback(stopped.append, "last")
        try:
            raise Stopped(2)
        except BaseException:
            stop_all(stack)
            raise
    assert stopped == ["last", "first"]
    text = "slime-launch: could not stop everything in order: ValueError: the actor is gone\n"
    assert capsys.readouterr().err == text


REPLAYED = ["--load-debug-rollout-data", "r_{rollout_id}.npz", "--rm-type", "math", "--colocate", "--num-rollout", "3"]


@pytest.mark.parametrize(
    ("iteration", "checkpoint", "line"),
    [
        (0, None, "training on steps 1 to 3 again, from the run's beginning"),
        (2, "iter_0000002", "training on step 3 again, from checkpoint iter_0000002"),
    ],
)
def test_a_replay_says_from_where_and_nothing_of_flags_that_nobody_gave(
    iteration, checkpoint, line, flags, to_words, tmp_path, monkeypatch
):
    """Whatever is without effect in it, such as --colocate; a run says that."""
    monkeypatch.setattr(slime_launch.run, "start_notes", lambda *_: [])  # of weights, which there are none of
    command = {name: value for name, value in flags.items() if name not in (*REPLAYED, "--save")}
    settings = parse_train([*to_words(command), *REPLAYED])
    weights = StartWeights(load="l", ref_load="r")
    manifest = Manifest(
        iteration=iteration, weight_version=iteration, checkpoint=checkpoint, source_state={}, flags={}, output_dir="o",
        load="l", ref_load="r",
    )  # fmt: skip
    checked = Checked(
        settings=settings, shape=None, manifest=manifest, weights=weights, overrides={}, topology=None, num_engines=0,
        notes=["a note"], replays=True,
    )  # fmt: skip
    assert opening_lines(checked, RunState(settings, manifest, weights, output_dir=tmp_path)) == [line]
    fresh = dataclasses.replace(checked, manifest=None, replays=False)
    lines = opening_lines(fresh, RunState(settings, None, weights, output_dir=tmp_path))
    assert any("--colocate" in one for one in lines) and "a note" in lines
    assert lines[-1].startswith("no --save: ") and not any("None" in one for one in lines)
