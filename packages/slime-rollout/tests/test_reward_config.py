from slime_rollout.config import RolloutConfig


def rewards(**changes):
    return RolloutConfig.of(hf_checkpoint="model", prompt_data="p", rollout_batch_size=4, **changes).rewards


def test_rule_is_exact_unless_something_else_scores():
    assert rewards().rule == "exact"
    assert rewards(rm_type="first_integer").rule == "first_integer"
    assert rewards(custom_rm_path="pkg.mod.fn").rule is None
    teacher = {"opd_type": "sglang", "rm_url": "http://a"}
    assert rewards(**teacher).rule is None
    assert rewards(**teacher, rm_type="math").rule == "math"


def test_the_time_limit_of_scoring_depends_on_what_scores():
    assert rewards(rm_type="math").reward_timeout == 10.0
    assert rewards(rm_type="remote_rm", rm_url="http://a").reward_timeout == 60.0
    assert rewards(custom_rm_path="pkg.mod.fn").reward_timeout == 60.0
    assert rewards(rm_type="math", rm_timeout=3.0).reward_timeout == 3.0
    assert (rewards().teacher_timeout, rewards(rm_timeout=3.0).teacher_timeout) == (60.0, 3.0)
