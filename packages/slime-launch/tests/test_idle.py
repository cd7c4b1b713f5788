"""Flags without effect: each flag of ours says what it needs, and is refused or named without it.

The cases are made of the rows: the flag with what it needs, and without, through what `plan` and `train` read.
"""

import pytest

from slime_core.flags import flag_specs
from slime_core.needs import GENERATES, LAGS, ROLLOUTS, SAMPLES, SCORES, TRAINERS, TRAINS, UPDATES, Condition
from slime_launch.config import CONFIGS
from slime_launch.flags import read_train
from slime_launch.idle import idle_flags
from slime_launch.plan.command import PlanConfig
from slime_launch.replay import ReplayConfig
from slime_launch.report.command import ReportConfig
from slime_launch.validate import notices

SPECS = {spec.dest: spec for config in CONFIGS.values() for spec in flag_specs(config)}
BASE = "--hf-checkpoint hf --load dist --prompt-data train.jsonl --rollout-batch-size 4 --num-rollout 2 --num-epoch 1"
BASE = f"{BASE} --n-samples-per-prompt 2 --rollout-num-gpus 4 --actor-num-gpus-per-node 4"
ABSENT = {
    GENERATES: "--loss-type sft_loss",
    SAMPLES: "--loss-type sft_loss",
    SCORES: "--load-debug-rollout-data {rollout_id}.npz --eval-prompt-data held",
    TRAINS: "--debug-rollout-only",
    TRAINERS: "--debug-rollout-only",
    UPDATES: "--debug-rollout-only",
    ROLLOUTS: "--num-rollout 0",
    LAGS: "",
}
"""What makes a run another than of a kind."""
VALUES = {"sglang_python": "python3", "sglang_router_url": "http://a:1", "train_env_vars": "{}", "rm_url": "http://a"}
VALUES |= {
    "rollout_external_engine_addrs": "a:1",
    "update_weight_receivers": "a:1",
    "apply_chat_template_kwargs": '{"a":1}',
}
VALUES |= {"load_debug_rollout_data": "{rollout_id}", "save_hf": "{rollout_id}", "custom_rm_kwargs": '{"a":1}'}
VALUES |= {"save_debug_train_data": "{rollout_id}{rank}", "save_debug_rollout_data": "{rollout_id}"}
ONE_VALUE = ("optimizer", "ckpt_format", "attention_dropout", "hidden_dropout")
NEEDING = [dest for dest, spec in SPECS.items() if spec.needs and dest not in ONE_VALUE]
BESIDE = {"disable_compute_advantages_and_returns": "--loss-type sft_loss"}


def words_of(dest, values=()):
    """A flag with a value that asks for something."""
    spec = SPECS[dest]
    if values or dest in VALUES:
        return f"{spec.name} {values[0] if values else VALUES[dest]}"
    if spec.is_switch:
        return spec.name
    if spec.choices:
        return f"{spec.name} {next(choice for choice in spec.choices if choice != spec.default)}"
    if spec.type is str:
        return f"{spec.name} other"
    start = spec.default if isinstance(spec.default, int | float) else 1
    values = (spec.type(value) for value in (start * 2, start + 1, start / 2, 0.5, 0.25))
    return (
        f"{spec.name} {next(value for value in values if value not in (0, spec.default) and not spec.problem(value))}"
    )


def beside(dest):
    """What is given with a flag so that it has an effect, by its row and those of the flags that it needs."""
    found = [BESIDE.get(dest, "")]
    for need in SPECS[dest].needs:
        if need == LAGS:
            found.append("--async-buffer-size 1")
        first = need.any_of[0]
        if not isinstance(first, Condition) or first.absent or first.dest == "prompt_data":
            continue
        if SPECS[first.dest].default not in first.values:
            found += [beside(first.dest), words_of(first.dest, first.values)]
    return " ".join(found)


def otherwise(condition):
    """A flag with another value than a condition wants."""
    spec = SPECS[condition.dest]
    return f"{spec.name} {next(choice for choice in spec.choices if choice not in condition.values)}"


def idle(words):
    """What is refused of a command, and what is only named, as far as it is about flags without effect."""
    settings, problems = read_train(words.split(), on_gpu=False)
    refused = [line for line in problems if "no effect" in line]
    return settings, refused, [line for line in idle_flags(settings).notes if "no effect" in line]


def names(line):
    return {word.rstrip(",:;") for word in line.split() if word.startswith("--")}


@pytest.mark.parametrize("config", [*CONFIGS.values(), PlanConfig, ReplayConfig, ReportConfig])
def test_every_flag_says_what_it_needs(config):
    assert [spec.name for spec in flag_specs(config) if spec.needs is None] == []
    known = SPECS if config in CONFIGS.values() else {spec.dest: spec for spec in flag_specs(config)}
    named = [one for spec in flag_specs(config) for need in spec.needs for one in need.any_of]
    assert {one.dest for one in named if isinstance(one, Condition)} <= known.keys()


@pytest.mark.parametrize("dest", NEEDING)
def test_a_flag_with_what_it_needs_has_an_effect(dest):
    _, refused, noted = idle(f"{BASE} {beside(dest)} {words_of(dest)}")
    assert not any(SPECS[dest].name in names(line.split(" no effect")[0]) for line in refused)
    assert not any(SPECS[dest].name in names(line.partition(":")[2]) for line in noted)


@pytest.mark.parametrize("dest", NEEDING)
def test_a_flag_without_what_it_needs_is_refused_or_named(dest):
    spec = SPECS[dest]
    for number, need in enumerate(spec.needs):
        first = need.any_of[0]
        if isinstance(first, Condition) and first.dest == "prompt_data":
            continue
        if need.kind is not None:
            without = ABSENT[need]
        elif need.is_without:
            without = words_of(first.dest, first.values)
        else:
            without = " ".join(otherwise(one) for one in need.any_of if SPECS[one.dest].default in one.values)
        _, refused, noted = idle(f"{BASE} {without} {words_of(dest)}")
        named = [line for line in refused if spec.name in names(line.split(" no effect")[0])]
        said = [line for line in noted if spec.name in names(line.partition(":")[2])]
        assert len(named) + len(said) == 1, (number, need, refused, noted)
        if spec.harmless:
            assert said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--kl-loss-coef 0.1",
            "--kl-loss-coef 0.1 has no effect without --use-kl-loss; give --use-kl-loss, or leave it out",
        ),
        ("--opd-kl-coef 0.5", "--opd-kl-coef 0.5 has no effect without --use-opd"),
        ("--lambd 0.9", "--lambd 0.9 has no effect without --advantage-estimator ppo"),
        ("--gamma 0.9", "--gamma 0.9 has no effect without --advantage-estimator ppo or reinforce_plus_plus"),
        ("--profile-step-start 2", "--profile-step-start 2 has no effect without --profile"),
        (
            "--rm-on-failure zero --dynamic-sampling-max-prompts 9",
            "--dynamic-sampling-max-prompts 9 has no effect without --dynamic-sam",
        ),
        ("--custom-generate-timeout 9", "--custom-generate-timeout 9.0 has no effect without --custom-generate-func"),
        ("--tis-clip 3 --opsm-delta 1", "--tis-clip 3.0 has no effect without --use-tis"),
        ("--value-clip 0.5", "--value-clip 0.5 has no effect with --advantage-estimator grpo"),
        ("--mis-upper-bound 3", "--mis-upper-bound 3.0 has no effect without --use-mis"),
        ("--use-mis --mis-lower-bound 0.5", "--mis-lower-bound 0.5 has no effect with --mis-mode truncate"),
        (
            "--loss-type sft_loss --use-mis --mis-upper-bound 3",
            "--mis-upper-bound 3.0, --use-mis have no effect with --l",
        ),
        (
            "--loss-type sft_loss --rollout-stop x",
            "--rollout-stop x has no effect, as nothing is generated with --loss-t",
        ),
    ],
)
def test_a_refusal_names_the_flag_and_what_it_needs(words, line):
    _, refused, _ = idle(f"{BASE} {words}")
    assert any(found.startswith(line) for found in refused), refused


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28",
            "no effect without --use-kl-loss: --kl-loss-coef",
        ),
        ("--kl-loss-type low_var_kl", "no effect without --use-kl-loss or --kl-coef: --kl-loss-type"),
        ("--tis-clip 2.0", "no effect without --use-tis: --tis-clip"),
        ("--gamma 1.0 --num-critic-only-steps 0", "no effect with --advantage-estimator grpo: --num-critic-only-steps"),
        (
            "--tensor-model-parallel-size 1 --sequence-parallel",
            "without --tensor-model-parallel-size: --sequence-parallel",
        ),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 99 --micro-batch-size 8", "--use-dynamic-batch-size: --micro"),
        ("--debug-rollout-only --use-tis --lr 1e-5", "no effect, as nothing is trained: --use-tis"),
    ],
)
def test_a_value_that_asks_for_nothing_is_named_and_goes_through(words, line):
    settings, refused, _ = idle(f"{BASE} {words}")
    assert refused == []
    assert any(line in found for found in notices(settings)), notices(settings)


@pytest.mark.parametrize("load", ["", "--load dist"])
def test_what_an_evaluation_does_not_look_at_is_named(load):
    """Rollouts, optimizer and saves, with trainers that only send weights and without any."""
    rollouts = "--num-epoch 3 --rollout-shuffle --over-sampling-batch-size 8 --log-passrate --eval-interval 5"
    optimizer = "--lr 1e-5 --weight-decay 0.1 --lr-warmup-iters 3 --clip-grad 2 --freeze-params-name-list a"
    saves = "--save-interval 2 --num-steps-per-rollout 2"
    words = (
        f"--hf-checkpoint hf --rollout-batch-size 1 --eval-prompt-data a b --num-rollout 0 --rollout-num-gpus 1 {load}"
    )
    settings, refused, noted = idle(f"{words} --save s {rollouts} {optimizer} {saves}")
    assert refused == []
    said = {line.partition(": ")[0]: names(line.partition(":")[2]) for line in noted}
    none = "no effect, as there are no trainers"
    kept = "no effect, as weights stay as they are"
    assert said.pop("no effect, as the run only evaluates") == names(rollouts)
    assert names(f"{optimizer} {saves}") == set().union(*said.values())
    assert set(said) == ({kept} if load else {kept, none})
    assert not any(line.startswith("--num-epoch") for line in notices(settings))


def test_a_file_of_settings_refuses_like_the_command_line_and_defaults_never_do(tmp_path):
    assert idle(BASE)[1:] == ([], [])
    (tmp_path / "run.toml").write_text("kl-loss-coef = 0.1\n")
    assert len(idle(f"{BASE} --config {tmp_path / 'run.toml'}")[1]) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--lr-warmup-iters 100 --lr 1e-4",
            "the warm-up takes 100 optimizer steps and the run has 2: the learning rate ends at 1e-06",
        ),
        (
            "--lr-warmup-iters 2 --lr 1e-4",
            "the warm-up takes 2 optimizer steps and the run has 2: the learning rate ends at 5e-05",
        ),
        (
            "--lr-decay-style linear --lr-decay-iters 10 --lr 1e-4",
            "the run's 2 optimizer steps: the learning rate ends at 9e-05",
        ),
        (
            "--advantage-estimator ppo --critic-lr-warmup-iters 9 --critic-lr 9e-5",
            "the critic: the warm-up takes 9 optimizer",
        ),
    ],
)
def test_a_course_of_the_learning_rate_that_is_longer_than_the_run_is_said(words, line):
    assert any(line in found for found in notices(idle(f"{BASE} {words}")[0]))


def test_a_course_that_fits_is_not_spoken_of():
    fitting = ("", "--lr-warmup-iters 1", "--lr-decay-style cosine", "--lr-decay-style linear --lr-warmup-fraction 0.5")
    for words in fitting:
        assert not any("learning rate ends" in line for line in notices(idle(f"{BASE} {words}")[0]))
