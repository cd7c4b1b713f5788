"""The settings of off-policy corrections, checked when they are built. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    tis_clip: float = flag(2.0, help="upper bound of the importance weights", least=0)
    tis_clip_low: float = flag(0.0, help="lower bound of the importance weights", least=0)
    use_mis: bool = flag(
        False, help="the same by token, sequence or geometric mean, with rejection and veto (masked IS; --mis-*)"
    )
    use_opsm: bool = flag(
        False, help="leave out sequences of negative advantage that have drifted (off-policy sequence masking)"
    )
    opsm_delta: float = flag(1e-4, unit="nats per token", help="largest drift that --use-opsm allows", least=0)
    get_mismatch_metrics: bool = flag(False, help="write how differently trainer and engine see the tokens, in detail")

    def contradictions(self) -> Iterator[str]:
        """Bounds that cross, and two corrections of the same thing."""
        yield from super().contradictions()
        if self.tis_clip_low > self.tis_clip:
            yield f"--tis-clip-low {self.tis_clip_low} must be at most --tis-clip {self.tis_clip}"
        if self.use_tis and self.use_mis:
            yield "--use-tis and --use-mis would weigh each token twice; give one of them"
        if self.use_rollout_logprobs and (self.use_tis or self.use_mis):
            other = "--use-tis" if self.use_tis else "--use-mis"
            yield f"--use-rollout-logprobs and {other} would both correct for the engine's log-probs; give one of them"

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the samples must carry the engine's log-probs."""
        return self.use_rollout_logprobs or self.use_tis or self.use_mis or self.get_mismatch_metrics

    @property
    def needs_step_sums(self) -> bool:
        """Whether the loss needs sums over the whole step that are known only after log-probs were computed."""
        return self.use_mis and self.mis_batch_normalize
