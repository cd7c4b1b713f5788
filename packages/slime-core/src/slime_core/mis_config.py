"""The settings of masked importance sampling, checked when they are built. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime_core.flags import Config, flag

MIS_LEVELS = ("token", "sequence", "geometric")
MIS_MODES = ("truncate", "clip", "mask", "none")


@dataclass(frozen=True, kw_only=True)
class MisConfig(Config):
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
    mis_upper_bound: float = flag(2.0, help="upper bound of the importance weights", above=0)
    mis_lower_bound: float | None = flag(
        None, help="lower bound of the weights (clip, mask); 1 / --mis-upper-bound if left out", least=0
    )
    mis_batch_normalize: bool = flag(False, help="scale the step's weights to a mean of 1")
    mis_rs_level: str | None = flag(
        None, choices=MIS_LEVELS, help="reject what has a ratio beyond the rejection bounds, at this level"
    )
    mis_rs_upper_bound: float = flag(2.0, help="upper rejection bound", above=0)
    mis_rs_lower_bound: float | None = flag(
        None, help="lower rejection bound; 1 / --mis-rs-upper-bound if left out", least=0
    )
    mis_veto_threshold: float | None = flag(
        None,
        help="reject a whole sequence if the ratio of one of its tokens is below this",
        above=0,
        most=1,
        advice="1e-4 is usual",
    )

    def contradictions(self) -> Iterator[str]:
        """Lower bounds above the upper ones."""
        for name, (lower, upper) in (("--mis", self.bounds), ("--mis-rs", self.rejection_bounds)):
            if lower > upper:
                yield f"{name}-lower-bound {lower:g} must be at most {name}-upper-bound {upper:g}; set both"

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
