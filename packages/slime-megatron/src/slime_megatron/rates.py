"""The learning rate's course, and what a run of some length makes of it. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_megatron.config import MegatronConfig


def rate_at(config: MegatronConfig, step: int) -> float:
    """The learning rate of an optimizer step, counted from 0: what Megatron's scheduler gives it."""
    warm_up, peak, last = config.lr_warmup_steps, config.lr, config.lr_decay_iters
    if warm_up > 0 and step <= warm_up:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * step / warm_up
    if config.lr_decay_style == "constant" or last is None:
        return peak
    if step > last:
        return config.min_lr
    way = (step - warm_up) / (last - warm_up)
    part = 1 - way if config.lr_decay_style == "linear" else (math.cos(math.pi * way) + 1) / 2
    return config.min_lr + part * (peak - config.min_lr)


def rate_notes(config: MegatronConfig, steps: int) -> Iterator[str]:
    """What of the course a run of so many optimizer steps does not reach, with the rate that it ends at."""
    if steps <= 0:
        return
    warm_up, end = config.lr_warmup_steps, rate_at(config, steps - 1)
    if warm_up >= steps and end != config.lr:
        yield (
            f"the warm-up takes {warm_up:g} optimizer steps and the run has {steps}: the learning rate ends at "
            f"{end:.3g}, and --lr is {config.lr:g}"
        )
    elif config.lr_decay_style != "constant" and config.lr_decay_iters is not None and config.lr_decay_iters > steps:
        yield (
            f"--lr-decay-iters {config.lr_decay_iters} are more than the run's {steps} optimizer steps: the learning "
            f"rate ends at {end:.3g}, and --min-lr is {config.min_lr:g}"
        )


def rate_contradictions(config: MegatronConfig) -> Iterator[str]:
    """What is wrong with the flags of the learning rate, a line each."""
    if config.min_lr > config.lr:
        yield f"--min-lr {config.min_lr} is above --lr {config.lr}; give at most {config.lr}"
    if config.lr_warmup_init > config.lr:
        yield f"--lr-warmup-init {config.lr_warmup_init} is above --lr {config.lr}; give at most {config.lr}"
    if config.lr_decay_style != "constant" and config.lr_decay_iters is None:
        yield (f"--lr-decay-style {config.lr_decay_style} needs --lr-decay-iters, the number of optimizer steps")
    if config.lr_decay_iters is not None and config.lr_warmup_iters >= config.lr_decay_iters:
        yield (f"--lr-warmup-iters {config.lr_warmup_iters} must be less than --lr-decay-iters {config.lr_decay_iters}")
    if config.lr_warmup_fraction is None:
        return
    if config.lr_decay_iters is None:
        yield "--lr-warmup-fraction needs --lr-decay-iters, the number of steps that it is a part of"
    if config.lr_warmup_iters:
        yield (
            f"--lr-warmup-fraction {config.lr_warmup_fraction} and --lr-warmup-iters {config.lr_warmup_iters} both say "
            "how long the warm-up is; give one of them"
        )
