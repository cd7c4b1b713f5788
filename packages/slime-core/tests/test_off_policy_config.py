import math

import pytest

from slime_core.config import OffPolicyConfig
from slime_core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tis_mode": "drop"}, "--tis-mode drop is unknown; allowed: truncate, icepop"),
        ({"tis_clip": 0.5, "tis_clip_low": 1.0}, "--tis-clip-low 1.0 must be at most --tis-clip 0.5"),
        ({"tis_clip_low": -0.5}, "--tis-clip-low -0.5 must be 0 or more"),
        ({"tis_clip": math.inf}, "--tis-clip inf must be a finite number, 0 or more"),
        ({"opsm_delta": -1.0}, "--opsm-delta -1.0 must be 0 or more"),
        ({"opsm_delta": math.nan}, "--opsm-delta nan must be"),
        ({"use_tis": True, "use_mis": True}, "--use-tis and --use-mis would weigh each token twice"),
        (
            {"use_rollout_logprobs": True, "use_mis": True},
            "--use-rollout-logprobs and --use-mis would both correct for the engine's log-probs; give one of them",
        ),
        ({"use_rollout_logprobs": True, "use_tis": True}, "--use-rollout-logprobs and --use-tis would both"),
        ({"mis_level": "word"}, "--mis-level word is unknown"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        OffPolicyConfig(**settings)


@pytest.mark.parametrize("switch", ["use_rollout_logprobs", "use_tis", "use_mis", "get_mismatch_metrics"])
def test_what_needs_the_engines_log_probs(switch):
    assert OffPolicyConfig(**{switch: True}).needs_rollout_log_probs


def test_opsm_takes_what_there_is():
    assert not OffPolicyConfig(use_opsm=True).needs_rollout_log_probs
