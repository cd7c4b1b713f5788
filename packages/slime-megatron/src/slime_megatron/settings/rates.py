"""The learning rate's course, and how far a run of some length follows it. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slime_core.flags import Config, flag
from slime_core.needs import TRAINERS, UPDATES, given

LR_DECAY_STYLES = ("constant", "linear", "cosine")
DECAYS = given("lr_decay_style", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class RateConfig(Config, needs=(TRAINERS, UPDATES)):
    """The learning rate of each optimizer step; base of :class:`slime_megatron.settings.config.MegatronConfig`."""

    lr: float = flag(1e-6, help="peak learning rate", least=0)
    min_lr: float = flag(0.0, help="learning rate at the end of a linear or cosine decay", least=0, needs=DECAYS)
    lr_decay_style: str = flag("constant", choices=LR_DECAY_STYLES, help="course of the learning rate after warm-up")
    lr_warmup_iters: int = flag(
        0, unit="steps", help="optimizer steps of linear warm-up; the first has the rate --lr-warmup-init", least=0
    )
    lr_warmup_fraction: float | None = flag(
        None, help="warm-up as a part of --lr-decay-iters, below 1", least=0, below=1
    )
    lr_warmup_init: float = flag(
        0.0,
        help="learning rate of the first step of a warm-up",
        least=0,
        needs=given("lr_warmup_iters") | given("lr_warmup_fraction") | given("critic_lr_warmup_iters"),
    )
    lr_decay_iters: int | None = flag(
        None,
        unit="steps",
        help="optimizer steps after which the rate is --min-lr; a constant rate has no decay",
        least=1,
        needs=DECAYS | given("lr_warmup_fraction"),
    )

    @property
    def lr_warmup_steps(self) -> float:
        """Optimizer steps of warm-up, from either of the two flags that say it. Need not be whole."""
        if self.lr_warmup_fraction is None or self.lr_decay_iters is None:
            return self.lr_warmup_iters
        return self.lr_warmup_fraction * self.lr_decay_iters

    def rate_at(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 0: what Megatron's scheduler gives it."""
        warm_up, peak, last = self.lr_warmup_steps, self.lr, self.lr_decay_iters
        if warm_up > 0 and step <= warm_up:
            return self.lr_warmup_init + (peak - self.lr_warmup_init) * step / warm_up
        if self.lr_decay_style == "constant" or last is None:
            return peak
        if step > last:
            return self.min_lr
        way = (step - warm_up) / (last - warm_up)
        part = 1 - way if self.lr_decay_style == "linear" else (math.cos(math.pi * way) + 1) / 2
        return self.min_lr + part * (peak - self.min_lr)

    def rate_notes(self, steps: int) -> Iterator[str]:
        """The part of the course that a run of so many optimizer steps does not reach, and the rate that it ends at."""
        if steps <= 0:
            return
        warm_up, end = self.lr_warmup_steps, self.rate_at(steps - 1)
        if warm_up >= steps and end != self.lr:
            yield (
                f"the warm-up takes {warm_up:g} optimizer steps and the run has {steps}: the learning rate ends at "
                f"{end:.3g}, and --lr is {self.lr:g}"
            )
        elif self.lr_decay_style != "constant" and self.lr_decay_iters is not None and self.lr_decay_iters > steps:
            yield (
                f"--lr-decay-iters {self.lr_decay_iters} are more than the run's {steps} optimizer steps: the learning "
                f"rate ends at {end:.3g}, and --min-lr is {self.min_lr:g}"
            )

    def contradictions(self) -> Iterator[str]:
        """Contradictions of the flags of the learning rate, a line each."""
        if self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr} is above --lr {self.lr}; give at most {self.lr}"
        if self.lr_warmup_init > self.lr:
            yield f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}; give at most {self.lr}"
        if self.lr_decay_style != "constant" and self.lr_decay_iters is None:
            yield (f"--lr-decay-style {self.lr_decay_style} needs --lr-decay-iters, the number of optimizer steps")
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            yield (f"--lr-warmup-iters {self.lr_warmup_iters} must be less than --lr-decay-iters {self.lr_decay_iters}")
        if self.lr_warmup_fraction is None:
            return
        if self.lr_decay_iters is None:
            yield "--lr-warmup-fraction needs --lr-decay-iters, the number of steps that it is a part of"
        if self.lr_warmup_iters:
            yield (
                f"--lr-warmup-fraction {self.lr_warmup_fraction} and --lr-warmup-iters {self.lr_warmup_iters} both say "
                "how long the warm-up is; give one of them"
            )
