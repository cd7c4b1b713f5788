import pytest

from slime_launch.flags.suggest import ELSEWHERE, nearest, unknown_flag
from slime_launch.flags.tables import train_groups

KNOWN = {spec.name for group in train_groups() for spec in group.flags}


@pytest.mark.parametrize(("name", "ours"), sorted(ELSEWHERE.items()))
def test_the_names_of_others_lead_to_flags_that_there_are(name, ours):
    assert ours in KNOWN and name not in KNOWN
    assert nearest(name, KNOWN) == nearest(name.replace("-", "_").replace("__", "--", 1), KNOWN) == ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("--num-rolout", "--num-rollout"),
        ("--global_batch_size", "--global-batch-size"),
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--n-sample-per-prompt", "--n-samples-per-prompt"),
        ("--use-wandb", None),
        ("--something-else", None),
    ],
)
def test_a_mistyped_flag(name, ours):
    assert nearest(name, KNOWN) == ours


def test_the_line():
    assert unknown_flag("--learning-rate", KNOWN) == "unknown flag --learning-rate; did you mean --lr?"
    assert unknown_flag("--use-wandb", KNOWN) == "unknown flag --use-wandb; see --help"
