"""The settings of masked importance sampling, checked when they are built. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.flags import flag

MIS_LEVELS = ("token", "sequence", "geometric")
MIS_MODES = ("truncate", "clip", "mask", "none")


@dataclass(frozen=True, kw_only=True)
class MisConfig:
    """Which importance weights :func:`slime_core.ops.mis_weights` gives, and what it rejects.

    Raises:
        ConfigError: A value is outside its range, with the value, the range and what to do.
    """

    mis_level: str = flag(
        "token",
        choices=MIS_LEVELS,
        help="what a weight is the ratio of: the token, the whole sequence (product), or its geometric mean",
    )
    mis_mode: str = flag(
        "truncate",
        choices=MIS_MODES,
        help="weights beyond the bounds: cut at the upper one, cut at both, set to 0; or all weights 1",
    )
    mis_upper_bound: float = flag(2.0, help="upper bound of the importance weights")
    mis_lower_bound: float | None = flag(
        None, help="lower bound of the weights (clip, mask); 1 / --mis-upper-bound if left out"
    )
    mis_batch_normalize: bool = flag(False, help="scale the step's weights to a mean of 1")
    mis_rs_level: str | None = flag(
        None, choices=MIS_LEVELS, help="reject what has a ratio beyond the rejection bounds, at this level"
    )
    mis_rs_upper_bound: float = flag(2.0, help="upper rejection bound")
    mis_rs_lower_bound: float | None = flag(None, help="lower rejection bound; 1 / --mis-rs-upper-bound if left out")
    mis_veto_threshold: float | None = flag(
        None, help="reject a whole sequence if the ratio of one of its tokens is below this"
    )

    def __post_init__(self) -> None:
        if self.mis_level not in MIS_LEVELS:
            raise ConfigError(f"--mis-level {self.mis_level} is unknown; allowed: {', '.join(MIS_LEVELS)}")
        if self.mis_mode not in MIS_MODES:
            raise ConfigError(f"--mis-mode {self.mis_mode} is unknown; allowed: {', '.join(MIS_MODES)}")
        if self.mis_rs_level is not None and self.mis_rs_level not in MIS_LEVELS:
            raise ConfigError(f"--mis-rs-level {self.mis_rs_level} is unknown; allowed: {', '.join(MIS_LEVELS)}")
        for name, lower, upper in (
            ("--mis", self.mis_lower_bound, self.mis_upper_bound),
            ("--mis-rs", self.mis_rs_lower_bound, self.mis_rs_upper_bound),
        ):
            if not 0 < upper < math.inf:
                raise ConfigError(f"{name}-upper-bound {upper} must be a finite number above 0")
            if not 0 <= _or_inverse(lower, upper) <= upper:
                raise ConfigError(
                    f"{name}-lower-bound {_or_inverse(lower, upper)} must be between 0 and {name}-upper-bound {upper}; "
                    "set both"
                )
        if self.mis_veto_threshold is not None and not 0 < self.mis_veto_threshold <= 1:
            raise ConfigError(
                f"--mis-veto-threshold {self.mis_veto_threshold} must be above 0 and at most 1; 1e-4 is usual"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the weights."""
        return _or_inverse(self.mis_lower_bound, self.mis_upper_bound), self.mis_upper_bound

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of what is not rejected."""
        return _or_inverse(self.mis_rs_lower_bound, self.mis_rs_upper_bound), self.mis_rs_upper_bound


def _or_inverse(lower: float | None, upper: float) -> float:
    return 1 / upper if lower is None else lower
