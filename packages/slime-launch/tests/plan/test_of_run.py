"""Profiles of runs: from rows whose speeds are known, those speeds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_launch.errors import ProfileError
from slime_launch.flags import parse_train
from slime_launch.plan.of_run import _bent, profile_of_runs
from slime_launch.plan.profile import mean_of
from slime_launch.plan.setup import setup_of
from slime_launch.plan.simulate import simulate

EACH, SHARED = 0.05, 0.01
"""Seconds of a decoding step, and more of it for each response that runs."""
FIXED, TOKEN, SEND, PREPARE, BETWEEN, SAVE = 2.0, 0.01, 0.5, 0.25, 0.125, 7.0
MINIMAL = "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 6 --n-samples-per-prompt 2"


@pytest.fixture
def run(tmp_path):
    """Writes what a run leaves: of one engine, with responses of so many tokens, all alike."""

    def write(*more, name="run", prompts=4, tokens=10, generate=None, slower=1.0, rows=()):
        directory = tmp_path / name
        directory.mkdir()
        settings = parse_train(
            [*MINIMAL.split(), "--rollout-batch-size", str(prompts), "--rollout-num-gpus", "1", *more]
        )
        entries = {name: {"value": value} for name, value in settings.flags().items()}
        (directory / "settings.json").write_text(json.dumps({"settings": entries}))
        samples, time = 2 * prompts, 1000.0
        found = []
        for rollout_id in range(6):
            seconds = {
                "generate": generate or tokens * (EACH + SHARED * samples),
                "reward": 0.0,
                "train": slower * (FIXED + TOKEN * samples * tokens),
                "update_weights": SEND,
            }
            seconds["rollout"] = seconds["generate"] + PREPARE
            step = sum(seconds[phase] for phase in ("rollout", "train", "update_weights"))
            time += step + BETWEEN + (SAVE if rollout_id in (2, 4) else 0.0)
            row = {"kind": "rollout", "rollout_id": rollout_id, "step": rollout_id, "time": time}
            row |= {f"perf/{phase}_time": value for phase, value in seconds.items()} | {"perf/step_time": step}
            row |= {f"rollout/response_len/{name}": float(tokens) for name in ("min", "median", "mean", "max")}
            row |= {"rollout/response_tokens": float(samples * tokens), "rollout/truncated_ratio": 0.0}
            found += [{"kind": "train", "rollout_id": rollout_id, "time": time}, row]
        found += rows
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        return directory

    return write


def test_runs_of_two_batch_sizes_show_what_is_shared_and_what_is_fixed(run):
    runs = [run(name="small", prompts=2), run(name="large", prompts=16)]
    profile = profile_of_runs(runs)
    for running, speed in profile.engine.decode:
        assert speed == pytest.approx(running / (EACH + SHARED * running), rel=1e-3)
    assert profile.trainer.fixed_seconds == pytest.approx(FIXED)
    assert profile.trainer.token_seconds == pytest.approx(TOKEN)
    assert profile.trainer.send_seconds == pytest.approx(SEND)
    assert profile.loop.prepare_seconds == pytest.approx(PREPARE)
    assert profile.loop.between_seconds == pytest.approx(BETWEEN)
    assert profile.lengths[0][1] == profile.lengths[-1][1] == 10
    assert profile.loop.hand_over_seconds is None
    assert not profile.notes


def test_a_run_that_overlaps_shows_how_much_slower_halves_are_together(run):
    apart = [run(name="small", prompts=2), run(name="large", prompts=16)]
    assert profile_of_runs(apart).loop.overlap_slowdown == 1
    together = run("--async-buffer-size", "2", name="together", prompts=16, slower=1.25, generate=1.0)
    profile = profile_of_runs([*apart, together])
    assert profile.loop.overlap_slowdown == pytest.approx(1.25)
    assert profile.trainer.token_seconds == pytest.approx(TOKEN)
    for running, speed in profile.engine.decode:
        assert speed == pytest.approx(running / (EACH + SHARED * running), rel=1e-3)


def test_rollouts_that_are_all_alike_leave_guesses_and_those_are_said(run):
    profile = profile_of_runs([run()])
    assert [note.split(":")[0] for note in profile.notes] == ["engine.decode", "trainer.fixed_seconds"]
    assert profile.trainer.token_seconds == pytest.approx(TOKEN + FIXED / 80)


@pytest.mark.parametrize("more", [(), ("--over-sampling-batch-size", "6", "--partial-rollout")])
def test_the_run_that_a_profile_is_of_takes_as_long_in_the_simulation(run, more):
    directory = run(*more)
    profile = profile_of_runs([directory])
    flags = {
        name: one["value"] for name, one in json.loads((directory / "settings.json").read_text())["settings"].items()
    }
    seconds = 3600 / simulate(profile, setup_of(flags, steps=6)).steps_per_hour
    generate, train = 10 * (EACH + SHARED * 8), FIXED + TOKEN * 80
    assert seconds == pytest.approx(generate + PREPARE + train + SEND + BETWEEN, rel=0.01)


def test_of_a_run_that_overlaps_the_waiting_says_how_fast_engines_are(run):
    directory = run("--async-buffer-size", "2", generate=6.0)
    profile = profile_of_runs([directory])
    flags = {
        name: one["value"] for name, one in json.loads((directory / "settings.json").read_text())["settings"].items()
    }
    seconds = 3600 / simulate(profile, setup_of(flags, steps=24)).steps_per_hour
    assert seconds == pytest.approx(6.0 + PREPARE + FIXED + TOKEN * 80 + SEND + BETWEEN, rel=0.05)
    assert "only the speed at one number of responses" in profile.notes[0]


def test_checkpoints_and_evaluations_are_times_of_their_own(run):
    evaluated = {"kind": "eval", "rollout_id": 0, "time": 0.0, "perf/eval_time": 30.0}
    profile = profile_of_runs([run("--save", "s", "--save-interval", "2", rows=[evaluated])])
    assert profile.loop.save_seconds == pytest.approx(SAVE)
    assert profile.loop.evaluate_seconds == 30.0
    assert profile.loop.between_seconds == pytest.approx(BETWEEN)


def test_lengths_have_the_mean_and_the_median_of_the_rollouts(run):
    directory = run()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "rollout":
            row |= {"rollout/response_len/min": 4.0, "rollout/response_len/median": 20.0}
            row |= {"rollout/response_len/mean": 60.0, "rollout/response_len/max": 400.0}
            row |= {"rollout/response_tokens": 480.0}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile = profile_of_runs([directory])
    assert mean_of(profile.lengths) == pytest.approx(60.0, rel=0.01)
    assert dict(profile.lengths)[0.5] == 20.0
    assert (profile.lengths[0], profile.lengths[-1]) == ((0.0, 4.0), (1.0, 400.0))


@given(middle=st.floats(1, 1e4), more=st.floats(0.001, 1e4), top=st.floats(0.51, 1.0), bend=st.floats(0.01, 100))
def test_lengths_grow_to_the_longest_whatever_is_rounded(middle, more, top, bend):
    tokens = [length for _, length in _bent(1.0, middle, middle + more, top, bend)]
    assert tokens == sorted(tokens)
    assert tokens[-1] == middle + more


def test_an_engines_log_shows_its_speed(run):
    directory = run()
    (directory / "logs").mkdir()
    line = "Decode batch, #running-req: {}, #token: 5, gen throughput (token/s): {}, #queue-req: 0\n"
    text = "".join(line.format(*one) for one in [(2, 30.0), (8, 90.0)] for _ in range(4))
    (directory / "logs" / "engine_0.log").write_text(text + line.format(100, 1.0))
    (few, slow), (many, fast) = profile_of_runs([directory]).engine.decode
    assert (few, many, fast / slow) == pytest.approx((2, 8, 3))


def test_a_log_that_misses_the_busy_part_does_not_set_the_speed(run):
    """Of 32 responses at a time it has lines of few, which are left at the end."""
    runs = [run(name="small", prompts=2), run(name="large", prompts=16)]
    (runs[1] / "logs").mkdir()
    line = "Decode batch, #running-req: {}, #token: 9, gen throughput (token/s): {}, #queue-req: 0\n"
    (runs[1] / "logs" / "engine_0.log").write_text((line.format(2, 30.0) + line.format(5, 50.0)) * 4)
    for running, speed in profile_of_runs(runs).engine.decode:
        assert speed == pytest.approx(running / (EACH + SHARED * running), rel=1e-3)
    (runs[1] / "logs" / "engine_0.log").write_text((line.format(2, 30.0) + line.format(24, 90.0)) * 4)
    assert [running for running, _ in profile_of_runs(runs).engine.decode] == [2, 24]


def test_lengths_of_a_function_that_cuts_each_response_are_not_all_the_longest(run):
    changed = {"rollout/truncated_ratio": 1.0, "rollout/response_len/max": 40.0, "rollout/response_len/mean": 14.0}
    directory = run()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | changed if row["kind"] == "rollout" else row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)
    assert mean_of(profile_of_runs([directory]).lengths) == pytest.approx(14, rel=0.02)


def test_hand_overs_are_taken_out_of_the_phases(run):
    directory = run()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"perf/sleep_time": 0.2, "perf/wake_up_time": 0.1} if row["kind"] == "rollout" else {}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile = profile_of_runs([directory])
    assert profile.loop.hand_over_seconds == pytest.approx(0.3)
    assert profile.trainer.send_seconds == pytest.approx(SEND - 0.1)


def test_a_directory_without_a_run_is_refused(tmp_path, run):
    with pytest.raises(ProfileError, match=r"has no settings.json of a run; give the --output-dir of one"):
        profile_of_runs([tmp_path])
    directory = run()
    (directory / "metrics.jsonl").write_text("")
    with pytest.raises(ProfileError, match=r"has no rollout that was generated and trained on"):
        profile_of_runs([directory])
    with pytest.raises(ProfileError, match=r"engines of 1 and 2 GPUs"):
        profile_of_runs(
            [run(name="one"), run("--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus", "2", name="two")]
        )
