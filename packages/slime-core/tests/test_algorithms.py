import pytest

from slime_core.algorithms import ADVANTAGE_ESTIMATORS, LOSSES, estimator_row, loss_that
from slime_core.config import DATA_LOSSES, ESTIMATORS, GROUP_RELATIVE, LOSS_TYPES, PAIR_LOSSES, AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.flags import collected_problems, flag_specs
from slime_core.ops.advantages import ESTIMATES
from slime_core.ops.objective import TOKEN_LOSSES

SETTINGS = {spec.dest for spec in flag_specs(AlgorithmConfig)}


@pytest.mark.parametrize("row", [*LOSSES.values(), *ADVANTAGE_ESTIMATORS.values()], ids=lambda row: row.name)
def test_settings_of_a_row_are_flags(row):
    named = {*row.settings, *getattr(row, "ignores", ())}
    assert named <= SETTINGS and getattr(row, "reference_unless", None) in {None, *row.settings}


def test_functions_of_estimators_are_there_and_all_are_used():
    rows = ADVANTAGE_ESTIMATORS.values()
    assert {row.estimate for row in rows} == ESTIMATES.keys()
    assert {row.token_loss for row in rows} == TOKEN_LOSSES.keys()
    with pytest.raises(ConfigError, match="the advantage estimator grop is unknown; allowed: grpo, gspo, cispo, ppo"):
        estimator_row("grop")


def test_losses_and_estimators_by_what_they_are():
    assert LOSS_TYPES == ("policy_loss", "sft_loss", "dpo_loss", "rm_loss", "custom_loss")
    assert DATA_LOSSES == ("sft_loss", "dpo_loss", "rm_loss") and PAIR_LOSSES == ("dpo_loss", "rm_loss")
    relative = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo")
    assert relative == GROUP_RELATIVE and set(ESTIMATORS) - set(relative) == {"ppo", "reinforce_plus_plus"}
    with pytest.raises(ValueError, match="no row of the table is wanted"):
        loss_that(lambda row: row.name == "none")
    assert (AlgorithmConfig().loss.name, AlgorithmConfig().estimator.name) == ("policy_loss", "grpo")


def test_an_unknown_name_is_a_row_of_which_nothing_is_so():
    """All that is wrong with a command is collected, and some of it depends on the loss."""
    with collected_problems() as found:
        config = AlgorithmConfig(loss_type="sft", advantage_estimator="grop")
    assert len(found) == 2
    assert not (config.on_data or config.on_pairs or config.needs_critic or config.compares_samples)
    assert not (config.zero_advantages_add_nothing or config.loss.value_head)
