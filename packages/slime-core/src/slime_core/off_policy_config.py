"""The settings of off-policy corrections, checked when they are built. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.flags import flag
from slime_core.mis_config import MisConfig

TIS_MODES = ("truncate", "icepop")


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(MisConfig):
    """What is done about tokens that another policy sampled than the one that trains on them.

    Raises:
        ConfigError: A value is outside its range, or two of them contradict each other.
    """

    use_rollout_logprobs: bool = flag(
        False, help="compare the policy with the engine's log-probs instead of the trainer's before the update"
    )
    use_tis: bool = flag(
        False, help="multiply each token's loss by its importance weight, trainer over engine (truncated IS)"
    )
    tis_mode: str = flag(
        "truncate", choices=TIS_MODES, help="weights beyond the bounds: cut to them, or set to 0 (IcePop)"
    )
    tis_clip: float = flag(2.0, help="upper bound of the importance weights")
    tis_clip_low: float = flag(0.0, help="lower bound of the importance weights")
    use_mis: bool = flag(
        False, help="the same by token, sequence or geometric mean, with rejection and veto (masked IS; --mis-*)"
    )
    use_opsm: bool = flag(
        False, help="leave out sequences of negative advantage that have drifted (off-policy sequence masking)"
    )
    opsm_delta: float = flag(1e-4, unit="nats per token", help="largest drift that --use-opsm allows")
    get_mismatch_metrics: bool = flag(False, help="write how differently trainer and engine see the tokens, in detail")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tis_mode not in TIS_MODES:
            raise ConfigError(f"--tis-mode {self.tis_mode} is unknown; allowed: {', '.join(TIS_MODES)}")
        if not 0 <= self.tis_clip_low <= self.tis_clip < math.inf:
            raise ConfigError(
                f"--tis-clip-low {self.tis_clip_low} and --tis-clip {self.tis_clip} must be finite numbers with "
                "0 ≤ low ≤ high"
            )
        if not 0 <= self.opsm_delta < math.inf:
            raise ConfigError(f"--opsm-delta {self.opsm_delta} must be a finite number of nats per token, 0 or more")
        if self.use_tis and self.use_mis:
            raise ConfigError("--use-tis and --use-mis would weigh each token twice; give one of them")
        if self.use_rollout_logprobs and (self.use_tis or self.use_mis):
            other = "--use-tis" if self.use_tis else "--use-mis"
            raise ConfigError(
                f"--use-rollout-logprobs and {other} would both correct for the engine's log-probs; give one of them"
            )

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the samples must carry the engine's log-probs."""
        return self.use_rollout_logprobs or self.use_tis or self.use_mis or self.get_mismatch_metrics

    @property
    def needs_step_sums(self) -> bool:
        """Whether the loss needs sums over the whole step that are known only after log-probs were computed."""
        return self.use_mis and self.mis_batch_normalize
