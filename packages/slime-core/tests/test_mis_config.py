import pytest

from slime_core.config import MisConfig
from slime_core.errors import ConfigError
from slime_core.flags import flag_specs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mis_level": "word"}, "--mis-level word is unknown; allowed: token, sequence, geometric"),
        ({"mis_mode": "drop"}, "--mis-mode drop is unknown; allowed: truncate, clip, mask, none"),
        ({"mis_rs_level": "word"}, "--mis-rs-level word is unknown"),
        ({"mis_upper_bound": 0.0}, "--mis-upper-bound 0.0 must be above 0"),
        ({"mis_rs_upper_bound": float("inf")}, "--mis-rs-upper-bound inf must be a finite number"),
        ({"mis_lower_bound": 3.0}, "--mis-lower-bound 3 must be at most --mis-upper-bound 2; set both"),
        ({"mis_upper_bound": 0.5}, "--mis-lower-bound 2 must be at most --mis-upper-bound 0.5; set both"),
        ({"mis_rs_lower_bound": -1.0}, "--mis-rs-lower-bound -1.0 must be 0 or more"),
        ({"mis_veto_threshold": 0.0}, "--mis-veto-threshold 0.0 must be above 0 and at most 1"),
        ({"mis_veto_threshold": 2.0}, "--mis-veto-threshold 2.0 must be above 0 and at most 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        MisConfig(**settings)


def test_a_lower_bound_left_out_is_the_inverse_of_the_upper():
    config = MisConfig(mis_upper_bound=4.0, mis_rs_upper_bound=1.25, mis_rs_lower_bound=0.0)
    assert config.bounds == (0.25, 4.0)
    assert config.rejection_bounds == (0.0, 1.25)


def test_every_setting_is_a_flag():
    names = [spec.name for spec in flag_specs(MisConfig)]
    assert names[:3] == ["--mis-level", "--mis-mode", "--mis-upper-bound"]
    assert len(names) == 9
