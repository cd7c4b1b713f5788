"""Metrics of a rollout and an evaluation, and the names that they are tracked under. No torch."""

from __future__ import annotations

import math
import re
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slime_core.errors import DataError
from slime_core.types import Sample, Status

REPETITION_CHARACTERS, REPETITION_FACTOR = 10_000, 10
_PREFIX = "eval/"
_OF_SETS = ("response_len/", "reward/")  # metrics of a rollout that held-out sets have too
# What follows the set's name where a number is not its score.
_DETAIL = re.compile(r"/|-(?:truncated_ratio|pass@\d+)\Z")


def rollout_metrics(samples: Sequence[Sample], reward_key: str | None = None) -> dict[str, float]:
    """Named numbers that describe a rollout.

    A trajectory that became several samples counts once among the rewards, with the mean of theirs.

    - ``raw_reward``: mean reward of the scored trajectories (left out when there is none).
    - ``reward/<part>``: mean of each further number of rewards given by name, over the trajectories where it is finite.
    - ``response_len/mean``, ``/median``, ``/max``, ``/min``: response tokens of the samples.
    - ``truncated_ratio``, ``aborted_ratio``, ``failed_ratio``: share of samples with that status.
    - ``kept_tokens/mean``: under top-p, top-k or min-p, how many tokens one was sampled from.
    - ``repetition_frac``: share of the samples whose response ends in circles; see :func:`is_repetitive`.
    - ``zero_std/count``: groups whose rewards are all equal, and which therefore teach GRPO nothing; ``zero_std/ratio``
      their share; ``zero_std/count_<reward>`` those of one reward, by :func:`zero_variance_groups`.

    Args:
        samples: The samples of a rollout. No samples give no metrics.
        reward_key: Which entry of a reward given by name.

    Raises:
        DataError: A reward is given by name and has no such entry.
    """
    if not samples:
        return {}
    metrics = length_metrics([sample.response_length for sample in samples], percentiles=())
    groups = _rewards_by_group(samples, reward_key)
    rewards = [reward for group in groups for reward in group]
    for status in (Status.TRUNCATED, Status.ABORTED, Status.FAILED):
        metrics[f"{status}_ratio"] = sum(sample.status == status for sample in samples) / len(samples)
    sets = [kept for sample in samples for kept in (sample.kept_tokens or "").split(";") if kept]
    if sets:
        metrics["kept_tokens/mean"] = sum(kept.count(" ") + 1 for kept in sets) / len(sets)
    metrics["repetition_frac"] = sum(is_repetitive(sample.response) for sample in samples) / len(samples)
    if rewards:
        constant = sum(min(group) == max(group) for group in groups)
        metrics["raw_reward"] = _mean(rewards)
        metrics["zero_std/count"] = float(constant)
        metrics["zero_std/ratio"] = constant / len(groups)
    return metrics | _reward_parts(samples, reward_key) | zero_variance_groups(samples, reward_key)


def is_repetitive(text: str) -> bool:
    """Whether the last 10,000 characters, as UTF-8, shrink to less than a tenth when zlib compresses them.

    Text in a natural language shrinks to about a third; text shorter than about a hundred bytes never shrinks that far.
    """
    tail = text[-REPETITION_CHARACTERS:].encode("utf-8", "surrogatepass")
    return len(tail) > REPETITION_FACTOR * len(zlib.compress(tail))


def eval_metrics(name: str, samples: Sequence[Sample], reward_key: str | None = None) -> dict[str, float]:
    """The numbers of one held-out set.

    - ``eval/<name>``: the score, which is the mean reward; a trajectory that became several samples counts once.
    - ``eval/<name>/reward/<part>``: mean of each further number of rewards that are given by name.
    - ``eval/<name>/stderr``: the score's standard error, from how prompts' mean rewards differ; of two prompts or more.
    - ``eval/<name>-pass@k`` for k = 1, 2, 4 … up to the samples of a prompt; see :func:`pass_rates`.
    - ``eval/<name>-truncated_ratio``: share of responses that met a limit of length.
    - ``eval/<name>/response_len/mean``, ``/median``, ``/max``, ``/min``: response tokens.

    The arguments and errors are those of :func:`rollout_metrics`. :func:`set_name_problem` checks the name.
    """
    rollout = rollout_metrics(samples, reward_key)
    tag = _PREFIX + name
    metrics = {tag: rollout["raw_reward"]} if "raw_reward" in rollout else {}
    means = [_mean(group) for group in _rewards_by_group(samples, reward_key)]
    if len(means) > 1:
        metrics[f"{tag}/stderr"] = statistics.stdev(means) / math.sqrt(len(means))
    metrics |= {f"{tag}-{rate}": value for rate, value in pass_rates(samples, reward_key).items()}
    if rollout:
        metrics[f"{tag}-truncated_ratio"] = rollout["truncated_ratio"]
    return metrics | {f"{tag}/{key}": value for key, value in rollout.items() if key.startswith(_OF_SETS)}


def eval_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """The score of each held-out set, found among any metrics by their names."""
    scores = {name.removeprefix(_PREFIX): value for name, value in metrics.items() if name.startswith(_PREFIX)}
    return {name: value for name, value in scores.items() if not _DETAIL.search(name)}


def set_name_problem(name: str) -> str | None:
    """Why a held-out set cannot be called so, as the end of a message; ``None`` if it can."""
    if not name or name != name.strip() or not name.isprintable():
        return "is empty, or has white space at an end or characters that cannot be printed"
    if found := _DETAIL.search(name):
        return f"has {found.group()!r}, which the names of its metrics use"
    return None


def pass_rates(samples: Iterable[Sample], reward_key: str | None = None, correct: float = 1.0) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4 … up to the smallest group: the mean over groups of :func:`pass_at_k`.

    A trajectory that became several samples is one attempt, with the mean of their rewards. Unscored samples are left
    out; rewards of at least ``correct`` count as correct.
    """
    groups = _rewards_by_group(samples, reward_key)
    rates = {}
    k = 1
    while groups and k <= min(map(len, groups)):
        solved = [pass_at_k(len(group), sum(reward >= correct for reward in group), k) for group in groups]
        rates[f"pass@{k}"] = _mean(solved)
        k *= 2
    return rates


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that k samples hold a correct one: ``1 − C(n − c, k) / C(n, k)``.

    Chen et al. 2021, equation 1, with n samples, c of them correct.

    Raises:
        DataError: ``0 ≤ c ≤ n`` or ``1 ≤ k ≤ n`` does not hold.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise DataError(
            f"pass@{k} of {num_samples} samples, {num_correct} correct: correct must be 0 to {num_samples}, "
            f"k must be 1 to {num_samples}"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def length_metrics(
    lengths: Sequence[int], name: str = "response_len", percentiles: Sequence[float] = (10, 25, 75, 90, 99)
) -> dict[str, float]:
    """Mean, median, extremes and percentiles of lengths, such as the response tokens of a rollout.

    Medians and percentiles do not add up: give all lengths of the rollout at once.

    Args:
        lengths: One number per response. None give no metrics.
        name: What comes before the slash in ``response_len/mean``, ``/median``, ``/max``, ``/min``, ``/p90`` …
        percentiles: Between 0 and 100.

    Raises:
        DataError: A percentile is outside 0 to 100.
    """
    if not lengths:
        return {}
    if wrong := [share for share in percentiles if not 0 <= share <= 100]:
        raise DataError(f"percentiles {wrong} must be between 0 and 100")
    values = {
        "mean": statistics.fmean(lengths),
        "median": float(statistics.median(lengths)),
        "max": float(max(lengths)),
        "min": float(min(lengths)),
    }
    values |= {f"p{share:g}": float(np.percentile(lengths, share)) for share in percentiles}
    return {f"{name}/{kind}": value for kind, value in values.items()}


def zero_variance_groups(
    samples: Iterable[Sample], reward_key: str | None = None, decimals: int = 1
) -> dict[str, float]:
    """``zero_std/count_<reward>``: groups whose rewards are all equal, by that reward.

    Such groups teach GRPO nothing; all wrong and all right ask for different remedies. Together they are the
    ``zero_std/count`` of :func:`rollout_metrics`. The counts of several rollouts add up. Rewards that round to the same
    ``decimals`` are counted together; unscored samples are left out.
    """
    constant = [group[0] for group in _rewards_by_group(samples, reward_key) if min(group) == max(group)]
    # Adding 0.0 makes -0.0 a plain 0.
    counts = Counter(round(reward, decimals) + 0.0 for reward in constant)
    return {f"zero_std/count_{reward:g}": float(count) for reward, count in sorted(counts.items())}


def _rewards_by_group(samples: Iterable[Sample], reward_key: str | None) -> list[list[float]]:
    """Per group the rewards of its scored trajectories."""
    groups: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.reward is not None:
            groups[sample.group_index][sample.trajectory].append(sample.scalar_reward(reward_key))
    return [[_mean(rewards) for rewards in group.values()] for group in groups.values()]


def _reward_parts(samples: Iterable[Sample], reward_key: str | None) -> dict[str, float]:
    """``reward/<part>``, in the order in which parts are met."""
    parts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        for name, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            if name != reward_key and isinstance(value, int | float) and math.isfinite(value):
                parts[name][sample.trajectory].append(float(value))
    return {f"reward/{name}": _mean([_mean(values) for values in found.values()]) for name, found in parts.items()}


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the largest float
        return sum(values) / len(values)
