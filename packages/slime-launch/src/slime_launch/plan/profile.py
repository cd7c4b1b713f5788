"""A run's speeds, as a small TOML file: what :mod:`slime_launch.plan.simulate` needs to know beyond a command's flags.

    lengths = [[0.0, 12], [0.5, 800], [0.9, 3000], [1.0, 8192]]   # part of all responses, their most tokens
    [engine]
    decode = [[1, 60.0], [64, 2500.0]]   # responses at a time, tokens per second of an engine

Between two points everything is linear. An engine with fewer responses than the first point decodes each as fast as
there; one with more than the last decodes no more in all. The trainer's seconds are those of the profiled number of
GPUs: the part per token shrinks as GPUs are added, in proportion, and the fixed part of a step stays.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from slime_core.files import MOST_WRITTEN, read_text, write_whole
from slime_launch.errors import ProfileError

Points: TypeAlias = tuple[tuple[float, float], ...]
ADVICE = "slime-launch report RUN --profile FILE writes one"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """How fast one engine generates.

    Attributes:
        gpus: GPUs of one engine.
        decode: Responses that run at a time, and tokens per second of all of them together.
        most_running: Responses that run at a time at most; others wait in the engine.
        prefill_tokens_per_second: Of prompts, in which nothing is decoded; ``None`` where ``decode`` has that in it.

    Raises:
        ProfileError: A value is outside its range.
    """

    gpus: int = 1
    decode: Points
    most_running: int = 128
    prefill_tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", _points("engine.decode", self.decode, above=0.0))
        _check("engine", self, gpus=1, most_running=1)
        if any(speed <= 0 for _, speed in self.decode):
            raise ProfileError(f"engine.decode has a speed of 0 or less: {_shown(self.decode)}; give tokens per second")
        if self.prefill_tokens_per_second is not None and not self.prefill_tokens_per_second > 0:
            raise ProfileError(
                f"engine.prefill_tokens_per_second is {self.prefill_tokens_per_second}; give more than 0, or leave it "
                "out where engine.decode has it"
            )

    def token_seconds(self) -> list[float]:
        """Seconds of one token of each response, by the number that run, from 0 (which none needs) to the most."""
        running, speeds = zip(*self.decode, strict=True)
        counts = np.arange(1, self.most_running + 1)
        together = np.interp(counts, running, speeds)
        few = counts < running[0]
        together[few] = counts[few] * speeds[0] / running[0]
        return [0.0, *(counts / together).tolist()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSpeed:
    """How fast the trainers are.

    Attributes:
        gpus: GPUs that trained when this was measured.
        token_seconds: Seconds for each response token, all passes and the prompt's share in them, on those GPUs.
        fixed_seconds: Of each optimizer step, however many GPUs and tokens.
        send_seconds: Of sending the weights, while engines pause.

    Raises:
        ProfileError: A value is outside its range.
    """

    gpus: int = 1
    token_seconds: float
    fixed_seconds: float = 0.0
    send_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check("trainer", self, gpus=1, token_seconds=0, fixed_seconds=0, send_seconds=0)

    def seconds(self, tokens: int, gpus: int, steps: int) -> float:
        """Of ``steps`` optimizer steps on ``tokens`` response tokens."""
        return steps * self.fixed_seconds + tokens * self.token_seconds * self.gpus / gpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpeed:
    """Seconds that the loop takes besides generating, training and sending.

    Attributes:
        prepare_seconds: From a rollout's last score to the start of training: writing it down, splitting it.
        between_seconds: From the record of one rollout to the begin of the next one.
        overlap_slowdown: How many times as long engines and trainers take while both work, where they share a
            machine's cores or its memory bandwidth; 1 where each has devices of its own.
        hand_over_seconds: Of all moves in a rollout by which trainers and engines give each other the GPUs; ``None`` if
            unknown, so that nothing can be said of ``--colocate``.

    Raises:
        ProfileError: A value is outside its range.
    """

    prepare_seconds: float = 0.0
    between_seconds: float = 0.0
    save_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    overlap_slowdown: float = 1.0
    hand_over_seconds: float | None = None

    def __post_init__(self) -> None:
        _check("loop", self, prepare_seconds=0, between_seconds=0, save_seconds=0, evaluate_seconds=0)
        _check("loop", self, overlap_slowdown=1)
        _check("loop", self, **({} if self.hand_over_seconds is None else {"hand_over_seconds": 0}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that is known of a workload and its hardware.

    Attributes:
        lengths: A part of all responses, from 0 to 1, and the tokens that those have at most.
        reward_seconds: Of one sample's score.
        reward_workers: Samples that are scored at a time; ``None`` for all.
        dropped: Part of all groups that a filter drops, from 0 to below 1.
        notes: What is a guess, for people.

    Raises:
        ProfileError: A value is outside its range.
    """

    lengths: Points
    engine: EngineSpeed
    trainer: TrainerSpeed
    loop: LoopSpeed = dataclasses.field(default_factory=LoopSpeed)
    prompt_tokens: int = 0
    reward_seconds: float = 0.0
    reward_workers: int | None = None
    dropped: float = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _points("lengths", self.lengths))
        object.__setattr__(self, "notes", tuple(self.notes))
        _check("", self, prompt_tokens=0, reward_seconds=0, dropped=0)
        if self.reward_workers is not None:
            _check("", self, reward_workers=1)
        parts, tokens = zip(*self.lengths, strict=True)
        if parts[0] != 0 or parts[-1] != 1 or list(tokens) != sorted(tokens) or tokens[0] < 1:
            raise ProfileError(
                f"lengths is {_shown(self.lengths)}; give pairs of a part and tokens that begin at part 0 with 1 token "
                "or more, grow, and end at part 1"
            )
        if self.dropped >= 1:
            raise ProfileError(f"dropped is {self.dropped}: no group would be left; give less than 1")

    def draw(self, count: int, numbers: np.random.Generator, most: int | None = None) -> list[int]:
        """Lengths of responses, at most ``most`` tokens each."""
        parts, tokens = zip(*self.lengths, strict=True)
        drawn = np.maximum(np.rint(np.interp(numbers.random(count), parts, tokens)), 1).astype(int)
        lengths: list[int] = (drawn if most is None else np.minimum(drawn, most)).tolist()
        return lengths


def mean_of(lengths: Points) -> float:
    """Mean tokens of a response whose length is distributed so."""
    return sum((to - part) * (few + many) / 2 for (part, few), (to, many) in pairwise(lengths))


SECTIONS: dict[str, type[Any]] = {"engine": EngineSpeed, "trainer": TrainerSpeed, "loop": LoopSpeed}


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ProfileError: There is none, it is not TOML, a key is unknown or missing, or a value is outside its range.
    """
    try:
        found = tomllib.loads(read_text(path, most=MOST_WRITTEN))
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read ({error.strerror}); {ADVICE}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"the profile {path} is not TOML: {error}; {ADVICE}") from None
    try:
        parts = {name: _made(config, name, found.pop(name, {})) for name, config in SECTIONS.items()}
        profile: Profile = _made(Profile, "", found | parts)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as :func:`read_profile` takes it."""
    own = {name: value for name, value in vars(profile).items() if name not in SECTIONS}
    lines = [*_lines(own)]
    for name in SECTIONS:
        lines += ["", f"[{name}]", *_lines(vars(getattr(profile, name)))]
    write_whole(path, "\n".join(lines) + "\n")


def _lines(values: dict[str, Any]) -> Iterable[str]:
    return (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value is not None)


def _made(config: type[Any], section: str, values: Any) -> Any:
    """A record from the values of its table; its own keys only."""
    if not isinstance(values, dict):
        raise ProfileError(f"{section} is {values!r}; give a table [{section}]")
    fields = inspect.signature(config).parameters
    if unknown := sorted(values.keys() - fields.keys()):
        where = f"[{section}] has" if section else "it has"
        raise ProfileError(f"{where} unknown {', '.join(unknown)}; known: {', '.join(fields)}")
    if missing := [name for name, one in fields.items() if name not in values and one.default is one.empty]:
        raise ProfileError(f"{f'[{section}] ' if section else ''}has no {', '.join(missing)}; give it")
    return config(**values)


def _points(name: str, given: Any, above: float = -math.inf) -> Points:
    """Pairs of numbers, sorted by the first, which must grow from pair to pair."""
    try:
        points = tuple((float(first), float(second)) for first, second in given)
        firsts = [first for first, _ in points]
        good = bool(points) and firsts[0] > above and all(math.isfinite(one) for pair in points for one in pair)
        good = good and all(a < b for a, b in pairwise(firsts))
    except (TypeError, ValueError):
        good, points = False, ()
    if not good:
        raise ProfileError(f"{name} is {_shown(given)}; give pairs of numbers such as [[1, 50], [8, 300]], growing")
    return points


def _check(section: str, record: Any, **least: float) -> None:
    """Numbers that are not below the least."""
    for name, bound in least.items():
        value = getattr(record, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not bound <= value < math.inf:
            where = f"{section}.{name}" if section else name
            raise ProfileError(f"{where} is {value!r}; give a number of {bound:g} or more")


def _shown(points: Sequence[Any] | Any) -> str:
    text = json.dumps(points, default=str)
    return text if len(text) < 80 else f"{text[:77]}..."
