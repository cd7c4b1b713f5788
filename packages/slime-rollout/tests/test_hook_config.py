from slime_core.flags import flag_specs
from slime_rollout.config import RolloutConfig
from slime_rollout.hook_config import CALLED, HOOKS, TIMED_HOOKS
from slime_rollout.hooks import HOOKS as KINDS


def names(need):
    return {flag.dest for flag in need.flags}


def test_every_flag_of_a_function_is_a_kind_of_hook_that_parameters_are_for():
    paths = {spec.dest for spec in flag_specs(RolloutConfig) if spec.metavar == "PATH"} - {"prompt_data"}
    assert paths == {kind.field for kind in KINDS}
    assert paths <= names(HOOKS) and names(TIMED_HOOKS) <= names(HOOKS)
    assert paths - names(TIMED_HOOKS) - names(CALLED) == {"custom_rm_path"}
