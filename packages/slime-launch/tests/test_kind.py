"""What a command line says about its kind of run: data, generation or recorded rollouts; trainers or none."""

import json
from pathlib import Path

import pytest

from slime_core.errors import SlimeError
from slime_launch import train
from slime_launch.cli import main
from slime_launch.flags import parse_train
from slime_launch.placement import plan_layout
from slime_launch.preflight import preflight
from slime_launch.run import describe, source_spec
from slime_launch.sources import make_source
from slime_launch.validate import notices
from slime_rollout.config import BUILT_IN_ROLLOUTS, SFT_ROLLOUT
from slime_rollout.data_service import DataService, DataSpec

CONVERSATION = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}


PAIR = {"prompt": "1", "chosen": "2", "rejected": "3"}


UPSTREAM_SFT = {
    "--rollout-function-path": SFT_ROLLOUT,
    "--input-key": "messages",
    "--rollout-shuffle": None,
    "--num-epoch": "3",
    "--loss-type": "sft_loss",
    "--loss-mask-type": "qwen3",
    "--calculate-per-token-loss": None,
    "--disable-compute-advantages-and-returns": None,
    "--debug-train-only": None,
    "--lr-decay-style": "cosine",
}


@pytest.fixture
def data_flags(flags, workspace):
    """The flags of a run on rows of a data set, written there."""

    def build(loss, row, count=8):
        (workspace / "rows.jsonl").write_text((json.dumps(row) + "\n") * count)
        for name in ("--colocate", "--n-samples-per-prompt", "--global-batch-size"):
            flags.pop(name, None)
        flags["--loss-type"], flags["--prompt-data"] = loss, str(workspace / "rows.jsonl")
        return flags

    return build


def checked(flags, to_words):
    return preflight(parse_train(to_words(flags)))


@pytest.mark.parametrize(
    ("loss", "row", "rows"), [("sft_loss", CONVERSATION, "conversations"), ("rm_loss", PAIR, "pairs")]
)
def test_rows_of_a_data_set_need_no_engines_and_no_room_for_them(data_flags, to_words, tmp_path, loss, row, rows):
    found = checked(data_flags(loss, row) | {"--micro-batch-size": "2"}, to_words)
    settings = found.settings
    assert (settings.kind.rows, settings.kind.generates, settings.kind.trains) == (rows, False, True)
    spec = source_spec(found, tmp_path)
    assert isinstance(spec, DataSpec) and spec.max_length == 512 and isinstance(make_source(spec), DataService)
    layout = plan_layout(settings.placed, cuda=False, trains=settings.kind.trains)
    assert (len(layout.bundles), layout.rollout) == (1, ())
    assert f"--loss-type {loss}: --prompt-data holds {rows}, no engines" in notices(settings)


def test_upstreams_words_for_sft_work(data_flags, to_words):
    flags = data_flags("sft_loss", CONVERSATION) | UPSTREAM_SFT
    del flags["--num-rollout"]
    settings = checked(flags, to_words).settings
    assert settings.num_rollout == settings.megatron.lr_decay_iters == 3 * 8 // 4
    assert "--num-epoch 3: 6 rollouts" in notices(settings)


def test_epochs_count_prompts_too_and_num_rollout_counts_alone(flags, to_words):
    flags |= {"--num-epoch": "5"}
    assert checked(flags, to_words).settings.num_rollout == 2
    del flags["--num-rollout"]
    found = checked(flags, to_words)
    assert found.settings.num_rollout == 10
    assert not any("left over" in line for line in found.said)


def test_rows_that_fill_no_rollout_are_said(flags, to_words):
    del flags["--num-rollout"]
    flags |= {"--num-epoch": "1", "--rollout-batch-size": "3"}
    flags |= {"--n-samples-per-prompt": "2", "--global-batch-size": "6"}
    found = checked(flags, to_words)
    assert found.settings.num_rollout == 2
    assert "--num-epoch 1: 2 of 8 rows are left over, as a rollout takes --rollout-batch-size 3" in found.said


@pytest.mark.parametrize(
    ("rows", "size", "said"),
    [
        (2, 32, "--prompt-data has 2 rows, and a rollout of --rollout-batch-size 32 has each of them 16 times"),
        (3, 8, "--prompt-data has 3 rows, and a rollout of --rollout-batch-size 8 has each of them up to 3 times"),
        (1, 2, "--prompt-data has 1 row, and a rollout of --rollout-batch-size 2 has it 2 times"),
        (8, 8, ""),
    ],
)
@pytest.mark.parametrize("loss", ["policy_loss", "sft_loss", "dpo_loss"])
def test_a_rollout_that_has_rows_more_than_once_is_said(rows, size, said, loss, flags, data_flags, to_words):
    if loss != "policy_loss":
        flags = data_flags(loss, CONVERSATION if loss == "sft_loss" else PAIR)
    path = Path(flags["--prompt-data"])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    flags = {name: value for name, value in flags.items() if name != "--global-batch-size"}
    found = checked(flags | {"--rollout-batch-size": str(size)}, to_words)
    lines = [line for line in found.said if line.startswith("--prompt-data has ")]
    assert [line.partition(";")[0] for line in lines] == ([said] if said else [])
    assert all(line.endswith(f"--rollout-batch-size {rows} or less") for line in lines)


@pytest.mark.parametrize(
    ("loss", "row", "changes", "message"),
    [
        ("dpo_loss", CONVERSATION, {}, r"no field 'chosen' .*\(all 8 rows of .* are bad\)"),
        (
            "dpo_loss",
            PAIR | {"rejected": "2"},
            {},
            r"are the same, so nothing is preferred \(all 8 rows of .* are bad\)",
        ),
        ("dpo_loss", PAIR, {"--n-samples-per-prompt": "4"}, "--n-samples-per-prompt 4: a row makes 2 with --loss-type"),
        ("sft_loss", PAIR, {}, r"no field 'messages' .*\(all 8 rows of .* are bad\)"),
        ("sft_loss", CONVERSATION, {"--use-kl-loss": None}, "--use-kl-loss has no effect with --loss-type sft_loss"),
        ("sft_loss", CONVERSATION, {"--debug-rollout-only": None}, "--debug-rollout-only generates"),
        ("sft_loss", CONVERSATION, {"--streaming-data": None}, "rows that are trained on are read whole"),
        (
            "dpo_loss",
            PAIR,
            {"--rollout-function-path": SFT_ROLLOUT},
            "gives conversations; add --loss-type sft_loss or",
        ),
        ("sft_loss", CONVERSATION, {"--rollout-function-path": BUILT_IN_ROLLOUTS[0]}, "takes rows of --prompt"),
        ("policy_loss", CONVERSATION, {"--rollout-function-path": "a.b"}, "a does not load: ModuleNotFoundError"),
        (
            "policy_loss",
            CONVERSATION,
            {"--rollout-function-path": "a.b", "--async-buffer-size": "1"},
            "makes one rollout when it is called",
        ),
        ("sft_loss", CONVERSATION, {"--rollout-function-path": "x.fully_async"}, "--async-buffer-size N does that"),
        ("custom_loss", CONVERSATION, {}, "--loss-type custom_loss needs --custom-loss-function-path"),
    ],
)
def test_what_does_not_go_together(data_flags, to_words, loss, row, changes, message):
    with pytest.raises(SlimeError, match=message):
        checked(data_flags(loss, row) | {"--micro-batch-size": "2"} | changes, to_words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--num-rollout": None}, "missing --num-rollout, or --num-epoch"),
        ({"--num-rollout": "0"}, "--num-rollout 0 only evaluates; give held-out sets"),
        ({"--debug-train-only": ""}, "--debug-train-only starts no engines; give --load-debug-rollout-data"),
        ({"--debug-rollout-only": "", "--debug-train-only": ""}, "--debug-rollout-only trains nothing and"),
        (
            {"--num-rollout": None, "--num-epoch": "1", "--rollout-batch-size": "16"},
            "8 rows are less than one rollout of --rollout-batch-size 16;",
        ),
        ({"--prompt-data": None}, "missing --prompt-data"),
    ],
)
def test_what_a_run_that_generates_needs(flags, to_words, changes, message):
    for name, value in changes.items():
        if value is None:
            flags.pop(name)
        else:
            flags[name] = value or None
    with pytest.raises(SlimeError, match=message):
        checked(flags, to_words)


def test_evaluation_alone_needs_neither_prompts_nor_a_checkpoint(flags, to_words, workspace):
    kept = {name: flags[name] for name in ("--hf-checkpoint", "--save")}
    kept |= {"--rollout-batch-size": "1", "--num-rollout": "0", "--rollout-num-gpus": "2"}
    kept |= {"--eval-prompt-data": str(workspace / "train.jsonl"), "--n-samples-per-prompt": "3"}
    found = checked(kept, to_words)
    assert found.weights is None and not found.settings.kind.trains and found.settings.megatron.save is None
    layout = plan_layout(found.settings.placed, cuda=True, trains=False)
    assert (layout.trainer, layout.rollout, layout.shared) == ((), (0, 1), False)
    assert describe(layout, external=True).startswith("placement: 2 for generation (GPUs); no trainers")
    assert "nothing is trained, and no checkpoint is written" in notices(found.settings)
    assert checked(kept | {"--load": flags["--load"]}, to_words).settings.kind.trains
    assert checked(kept | {"--save-interval": "20"}, to_words).settings.megatron.save_interval is None


def test_rollouts_alone_take_the_engines_place_of_a_colocated_run(flags, to_words, tmp_path):
    found = checked(flags | {"--debug-rollout-only": None, "--actor-num-gpus-per-node": "2"}, to_words)
    layout = plan_layout(found.settings.placed, cuda=False, trains=found.settings.kind.trains)
    assert (layout.trainer, layout.rollout) == ((), (0, 1))
    spec = source_spec(found, tmp_path)
    assert not spec.weights_follow and not spec.colocate and spec.num_gpus == 2


@pytest.mark.parametrize(
    ("name", "words", "passed"),
    [
        ("sft", ["--lr", "1"], ["--loss-type", "sft_loss", "--lr", "1"]),
        ("eval", ["--num-rollout", "9"], ["--rollout-batch-size", "1", "--num-rollout", "9", "--num-rollout", "0"]),
    ],
)
def test_short_commands(name, words, passed, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda argv, notes=(): seen.append(argv) or 0)
    assert main([name, *words]) == 0
    assert seen == [passed]


@pytest.mark.parametrize(
    ("more", "compares"),
    [
        ({}, True),
        ({"--advantage-estimator": "reinforce_plus_plus", "--normalize-advantages": None}, False),
        ({"--custom-reward-post-process-path": "hook:rewards"}, False),
    ],
)
def test_equal_rewards_teach_nothing_where_samples_are_compared(more, compares, flags, to_words):
    assert parse_train(to_words(flags | more)).compares_samples is compares


def test_what_a_run_has_is_still_found_in_its_settings_with_a_warning(flags, to_words):
    settings = parse_train(to_words(flags))
    for name in ("generates", "trains", "rows", "is_recorded", "only_evaluates", "trainer_sleeps", "engines_sleep"):
        with pytest.warns(DeprecationWarning, match=rf"Settings\.{name} is now Settings\.kind\.{name}; ") as said:
            assert getattr(settings, name) == getattr(settings.kind, name)
        assert said[0].filename == __file__
    with pytest.raises(AttributeError, match=r"^Settings has no attribute 'nothing'$"):
        settings.nothing  # noqa: B018
    assert not hasattr(settings, "has_critic")
