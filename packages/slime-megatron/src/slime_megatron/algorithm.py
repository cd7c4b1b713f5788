"""Which algorithms this trainer can run, and the advantage function that a user may bring. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.user_functions import load_function

if TYPE_CHECKING:
    from slime_core.ops import AdvantageEstimator

_FLAG = "--custom-advantage-function-path"


def check_algorithm(algorithm: AlgorithmConfig) -> AdvantageEstimator | None:
    """Check that the trainer has what the algorithm needs. Can be asked before a run starts.

    Returns:
        The advantage function of the user's, if there is one.

    Raises:
        ConfigError: ppo, which needs a critic; or there is no such function.
    """
    path = algorithm.custom_advantage_function_path
    if algorithm.advantage_estimator == "ppo" and path is None:
        raise ConfigError(
            "--advantage-estimator ppo needs a critic, and this trainer has none; take another estimator, such as "
            "rloo or reinforce_plus_plus_baseline. `slime_core.ops` has ppo's advantages and losses for other trainers"
        )
    return None if path is None else load_function(path, _FLAG, arguments=("inputs",))
