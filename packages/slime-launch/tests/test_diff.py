"""Where two runs part: each planted cause is named, and what is equal gets said so."""

import json
from pathlib import Path

import pytest

from slime_core.errors import DamagedError
from slime_launch.diff import diff
from slime_launch.errors import FlagError, PreflightError
from support.planted_runs import flip_bit, plant, set_log_prob, set_mask, set_token
from support.written import SETTINGS, Written


def set_prompt(written):
    for sample in written.samples[1]:
        sample.prompt = "prompt one"


PLANTED = {
    "seed": (lambda one: one.settings.update(seed=7), ["--seed: 1234 and 7"]),
    "one flag": (lambda one: one.settings.update(lr=2e-6), ["--lr: 1e-06 and 2e-06"]),
    "a library": (lambda one: one.packages.update(torch="2.13.1"), ["torch: 2.13.0 and 2.13.1"]),
    "an engine's version": (
        lambda one: one.engine_packages.update(sglang="0.5.24"), ["the engines' sglang: 0.5.23 and 0.5.24"],
    ),
    "one prompt": (
        set_prompt,
        ["1 step is equal; in step 2 (rollout_id 1) prompt differs in 4 of 4 samples, first in sample 4 from byte 8"],
    ),
    "one token": (
        set_token,
        ["in step 3 (rollout_id 2) tokens differs in 1 of 4 samples, first in sample 11 from number 3 on: 20 and 21"],
    ),
    "one token's mask": (set_mask, ["in step 2 (rollout_id 1) loss_mask differs in 1 of 4 samples, first in sample 6"]),
    "an engine's log-prob": (
        set_log_prob,
        [
            "0 steps are equal; in step 1 (rollout_id 0) rollout_log_probs differs in 1 of 4 samples, first in sample "
            "1 from number 1",
        ],
    ),
    "rank order": (
        lambda one: setattr(one, "swapped", 1),
        ["in step 2 (rollout_id 1) data-parallel rank 0 trains on other samples"],
    ),
    "a loss": (
        lambda one: one.losses.__setitem__(2, 0.25),
        ["in step 3 (rollout_id 2) in optimizer step 1 train/loss is 0.5 and 0.25"],
    ),
    "a bit of a weight": (flip_bit, ["in step 2 (rollout_id 1) 1 of 3 weights differ after it: output.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_found(tmp_path, capsys, name):
    change, lines = PLANTED[name]
    runs = Written().write(tmp_path / "a"), plant(change)().write(tmp_path / "b")
    assert diff(runs) == 1
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed


def test_equal_runs_get_a_certificate(tmp_path, capsys):
    runs = Written().write(tmp_path / "a"), Written().write(tmp_path / "b")
    assert diff(runs) == 0
    assert "equal: 3 steps to the last bit" in (out := capsys.readouterr().out) and "3 weights after each" in out


EQUAL_IN_EFFECT = {
    "fp32 by default and said": ({"bf16": False, "fp32": False}, {"bf16": False, "fp32": True}),
    "a switch that is off and its opposite": (
        {"async_save": False, "no_async_save": False}, {"async_save": False, "no_async_save": True},
    ),
    "a switch that stands for two": (
        {"offload": False, "offload_train": True, "offload_rollout": True},
        {"offload": True, "offload_train": True, "offload_rollout": True},
    ),
    "another file with the same values": ({"config": "a.toml"}, {"config": "b.toml"}),
    "an empty list and none": ({"rollout_stop": []}, {"rollout_stop": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL_IN_EFFECT)
def test_settings_that_are_equal_in_effect_are_no_difference(tmp_path, capsys, name):
    one, other = EQUAL_IN_EFFECT[name]
    runs = Written(SETTINGS | one).write(tmp_path / "a"), Written(SETTINGS | other).write(tmp_path / "b")
    assert diff(runs) == 0
    assert "settings, packages and environment are the same" in capsys.readouterr().out


def test_a_switch_that_differs_is_named_once_and_not_with_its_opposite(tmp_path, capsys):
    one, other = {"bf16": True, "fp32": False}, {"bf16": False, "fp32": True}
    assert diff((Written(SETTINGS | one).write(tmp_path / "a"), Written(SETTINGS | other).write(tmp_path / "b"))) == 1
    assert "these differ:\n  --bf16: True and False\nequal" in capsys.readouterr().out


def test_what_one_run_alone_has_is_in_one_line_of_each_kind(tmp_path, capsys):
    first = Written(SETTINGS | {"save_interval": 2, "eval_prompt_data": ["held", "h.jsonl"]})
    first.packages = {"torch": "2.13.0"} | {f"package-{letter}": "1" for letter in "abcdefghij"}
    second = Written(SETTINGS | {"load_debug_rollout_data": "r.npz"})
    second.environment = {"RAY_AUTH_MODE": "token", "RAY_CLIENT_MODE": "0"}
    assert diff((first.write(tmp_path / "a"), second.write(tmp_path / "b"))) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[:5] == [
        "these differ:",
        "  only in the first run: --eval-prompt-data ['held', 'h.jsonl'], --save-interval 2",
        f"  only in the first run: {', '.join(f'package-{letter} 1' for letter in 'abcdefgh')}, 2 more",
        "  only in the second run: --load-debug-rollout-data r.npz",
        "  only in the second run: $RAY_AUTH_MODE token, $RAY_CLIENT_MODE 0",
    ]


def test_a_run_without_engines_has_no_engine_packages_to_differ(tmp_path, capsys):
    """Such as a replay."""
    replayed = Written()
    replayed.engine_packages = {}
    assert diff((Written().write(tmp_path / "a"), replayed.write(tmp_path / "b"))) == 0
    assert "the engines'" not in capsys.readouterr().out


def test_a_shorter_run_is_compared_as_far_as_it_goes(tmp_path, capsys):
    shorter = Written()
    shorter.samples = shorter.samples[:2]
    assert diff((Written().write(tmp_path / "a"), shorter.write(tmp_path / "b"))) == 0
    assert "the runs have 3 and 2 steps; those that both have were compared" in capsys.readouterr().out


def test_a_run_that_begins_later_is_compared_step_by_step(tmp_path, capsys):
    """As a replay from a checkpoint does."""
    runs = Written().write(tmp_path / "a"), plant(set_token)().write(tmp_path / "b")
    sums = tmp_path / "b" / "sums.jsonl"
    lines = [json.loads(line) for line in sums.read_text().splitlines()]
    lines[1]["names"] = lines[0]["names"]
    sums.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    assert diff(runs) == 1
    printed = capsys.readouterr().out
    assert "1 step is equal; in step 3 (rollout_id 2) tokens differs in 1 of 4 samples" in printed
    assert "of the 2 steps that both have\n" in printed and "  tokens: 1 of 8 samples differ\n" in printed


def test_runs_without_a_step_in_common_cannot_be_compared(tmp_path):
    runs = Written().write(tmp_path / "a"), Written().write(tmp_path / "b")
    for run, kept in zip(runs, (slice(0, 2), slice(2, 3)), strict=True):
        path = Path(run) / "sums.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[kept]))
    with pytest.raises(PreflightError, match=r"no step in common: \S+a has steps 1 to 2 and \S+b has step 3$"):
        diff(runs)


def test_without_the_rollouts_the_field_is_named(tmp_path, capsys):
    runs = Written().write(tmp_path / "a"), plant(set_token)().write(tmp_path / "b", keeps=False)
    assert diff(runs) == 1
    assert "first in sample 11; --save and --keep-rollouts in both runs would name the token" in capsys.readouterr().out


def test_what_is_no_run(tmp_path, capsys):
    with pytest.raises(FlagError, match="diff needs two runs' --output-dir"):
        diff([str(tmp_path)])
    with pytest.raises(PreflightError, match=r"has no sums.jsonl, which a run of `slime-launch train` writes"):
        diff([str(tmp_path), str(tmp_path)])
    assert diff(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: slime-launch diff RUN_A RUN_B")


def test_a_run_that_was_killed_before_its_first_rollout_is_not_equal_to_anything(tmp_path):
    first, second = Written(), Written(samples=[])
    runs = first.write(tmp_path / "a"), second.write(tmp_path / "b")
    with pytest.raises(PreflightError, match=r"b was not trained on any rollout: its sums.jsonl is empty"):
        diff(runs)
    (tmp_path / "a" / "settings.json").write_text('{"settings": ')
    with pytest.raises(PreflightError, match=r"settings.json cannot be read"):
        diff(runs)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("settings.json", "[]"), ("settings.json", '{"settings": {"a": 1}}'), ("metrics.jsonl", "{}"),
        ("sums.jsonl", '{"rollout_id": 0}'), ("sums.jsonl", '{"rollout_id": 0, "samples": 1, "index": 2}'),
    ],
)  # fmt: skip
def test_what_no_run_writes_is_one_line(tmp_path, file, content):
    runs = [Written().write(tmp_path / name) for name in "ab"]
    (tmp_path / "b" / file).write_text(content)
    with pytest.raises(DamagedError, match=r"b.* is damaged"):
        diff(runs)
