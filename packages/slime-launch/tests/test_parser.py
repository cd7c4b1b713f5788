from pathlib import Path

import pytest

from slime_core.flags import FlagSpec, Range
from slime_core.words import suggestions
from slime_launch.errors import FlagError
from slime_launch.flags import train_groups
from slime_launch.parser import FlagGroup, build_parser, help_line, nearest, parse, unknown_flag

DATA = Path(__file__).parent / "data"

SPECS = (
    FlagSpec(name="--num-rollout", dest="num_rollout", type=int, default=1, help="rounds", unit="rollouts"),
    FlagSpec(name="--num-steps", dest="num_steps", type=int, default=1, help="steps"),
    FlagSpec(name="--lr", dest="lr", type=float, default=1e-6, help="learning rate"),
    FlagSpec(name="--colocate", dest="colocate", type=bool, default=False, help="share"),
    FlagSpec(name="--eval-prompt-data", dest="eval_prompt_data", type=str, default=(), help="sets", nargs="+"),
    FlagSpec(name="--kind", dest="kind", type=str, default="a", help="kind", choices=("a", "b")),
    FlagSpec(name="--share", dest="share", type=str, default="auto", help="s", choices=("auto", "on"), bare="on"),
)
GROUPS = [FlagGroup("all", SPECS)]


def read(*words: str, groups=GROUPS):
    return parse(groups, build_parser(groups, prog="p", description="d"), words)


def test_only_given_flags_come_back():
    assert read("--num-rollout", "3", "--colocate") == {"num_rollout": 3, "colocate": True}


def test_equals_sign_and_negative_numbers():
    assert read("--num-rollout=-1", "--lr", "-0.5", "--num-steps", "-2") == {
        "num_rollout": -1,
        "lr": -0.5,
        "num_steps": -2,
    }


def test_a_repeated_flag_with_several_values_appends():
    assert read("--eval-prompt-data", "a", "1", "--lr", "2", "--eval-prompt-data", "b", "3") == {
        "eval_prompt_data": ("a", "1", "b", "3"),
        "lr": 2.0,
    }


def test_a_flag_may_stand_without_its_value():
    assert read("--share", "--lr", "2") == {"share": "on", "lr": 2.0}
    assert read("--share", "auto") == {"share": "auto"}


def test_the_last_of_a_repeated_single_value_counts():
    assert read("--num-rollout", "1", "--num-rollout", "2") == {"num_rollout": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-rolout", "3"], "unknown flag --num-rolout; did you mean --num-rollout?"),
        (["--num_rollout=3"], "unknown flag --num_rollout; did you mean --num-rollout?"),
        (["--num-roll", "3"], "unknown flag --num-roll; did you mean --num-rollout?"),
        (["--zzz"], "unknown flag --zzz; see --help"),
        (["--num-rollout", "three"], "--num-rollout: 'three' is not a whole number"),
        (["--num-rollout", "3.5"], "--num-rollout: '3.5' is not a whole number"),
        (["--lr", "fast"], "--lr: 'fast' is not a number"),
        (["--num-rollout"], "--num-rollout: expected one argument"),
        (["--kind", "c"], "--kind: invalid choice: 'c' (choose from 'a', 'b')"),
        (["--colocate", "true"], "unexpected 'true' after --colocate; that flag takes no such value"),
        (["stray"], "unexpected 'stray'; flags start with --"),
        (["lr=3"], "unexpected 'lr=3'; here it is --lr 3"),
        (["num_steps=3"], "unexpected 'num_steps=3'; here it is --num-steps 3"),
        (["-lr=3"], "unexpected '-lr=3'; here it is --lr 3"),
        (["-colocate"], "unexpected '-colocate'; here it is --colocate"),
        (["\N{EM DASH}colocate"], "unexpected '\N{EM DASH}colocate'; here it is --colocate"),
        (["--lr", "3", "a b.toml"], "unexpected 'a b.toml'; give a run file as --config 'a b.toml'"),
        (["--lr", "3", "--colocate", "3"], "unexpected '3' after --colocate; that flag takes no such value"),
        (["--kind=a", "b"], "unexpected 'b' after --kind=a; that flag takes no such value"),
        (["--share", "on", "x"], "unexpected 'x' after --share; that flag takes no such value"),
        (["--num-steps", "2", "-x"], "unexpected '-x' after --num-steps; that flag takes no such value"),
        (["--eval-prompt-data", "a", "-x"], "unexpected '-x'; flags start with --"),
    ],
)
def test_errors_are_one_line(words, message):
    with pytest.raises(FlagError) as caught:
        read(*words)
    assert str(caught.value) == message


def test_every_word_that_belongs_to_no_flag_is_named():
    with pytest.raises(FlagError) as caught:
        read("a", "--colocate", "b", "c", "--eval-prompt-data", "d", "--lr", "1", "e")
    assert [line.split()[1].rstrip(";") for line in str(caught.value).splitlines()] == ["'a'", "'b'", "'c'", "'e'"]


def test_several_unknown_flags_in_one_message():
    with pytest.raises(FlagError, match=r"--num-rolout.*\n.*--zzz"):
        read("--num-rolout", "3", "--zzz")


def test_everything_that_cannot_be_read_or_is_out_of_range_is_reported_together():
    batch = FlagSpec(name="--batch", dest="batch", type=int, default=1, help="size", range=Range(least=1))
    with pytest.raises(FlagError) as caught:
        read(
            "--zzz", "9", "--kind", "c", "--num-rollout=three", "--batch", "0", "--lr", "--num-steps", "2",
            groups=[FlagGroup("one", (*SPECS, batch))],
        )  # fmt: skip
    lines = str(caught.value).splitlines()
    assert [line.split()[0].rstrip(":") for line in lines] == ["unknown", "--kind", "--num-rollout", "--lr", "--batch"]


def test_a_flag_without_default_must_be_given():
    import dataclasses

    spec = FlagSpec(name="--data", dest="data", type=str, default=dataclasses.MISSING, help="file")
    with pytest.raises(FlagError, match="missing --data"):
        read("--lr", "1", groups=[FlagGroup("one", (*SPECS, spec))])
    assert help_line(spec) == "file [required]"


def test_help_shows_unit_and_default():
    assert help_line(SPECS[0]) == "rounds [rollouts; default 1]"
    assert help_line(SPECS[3]) == "share"


KNOWN = {spec.name for group in train_groups() for spec in group.flags}


def test_misspelt_flags_are_refused_and_the_right_one_is_among_three_suggestions():
    pairs = [line.split() for line in (DATA / "misspellings.txt").read_text().splitlines()]
    assert len(pairs) == 200
    missed = [(typed, right) for typed, right in pairs if right not in suggestions(typed, KNOWN)]
    assert len(missed) <= 10, missed
    assert max(len(suggestions(typed, KNOWN)) for typed, _ in pairs) <= 3
    for typed, _ in pairs:
        assert typed not in KNOWN
        assert unknown_flag(typed, KNOWN).startswith(f"unknown flag {typed}; ")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("--num-rolout", "--num-rollout"),
        ("--global_batch_size", "--global-batch-size"),
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--n-sample-per-prompt", "--n-samples-per-prompt"),
        ("--something-else", None),
    ],
)
def test_a_mistyped_flag(name, ours):
    assert nearest(name, KNOWN) == ours


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("--learning-rate", "unknown flag --learning-rate; here it is --lr"),
        ("--learning_rate", "unknown flag --learning_rate; here it is --lr"),
        ("--use-vllm", "unknown flag --use-vllm; leave it out: SGLang generates"),
        ("--multimodal-keys", "--multimodal-keys is not built: models that see images are not built"),
        ("--save-intervall", "unknown flag --save-intervall; did you mean --save-interval?"),
        ("--something-else", "unknown flag --something-else; see --help"),
    ],
)
def test_the_line(name, line):
    assert unknown_flag(name, KNOWN - {"--multimodal-keys"}) == line
