"""The table, the picture and the command of the best way that ``plan --simulate`` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_convert.progress import aligned
from slime_launch.config import Settings
from slime_launch.plan.profile import Profile
from slime_launch.plan.splits import PlannedWay, best_of, command_of, in_config_file, try_ways

TITLES = (
    *("train", "generate", "ahead", "steps/h", "samples/s", "tokens/s"),
    *("trainers idle", "engines idle", "stale", "at most", "again", ""),
)
PANELS = (
    ("samples per second", "samples_per_second"),
    ("trainers idle", "trainers_idle"),
    ("engines idle", "engines_idle"),
    ("mean staleness (versions)", "mean_staleness"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaysCompared:
    """All ways, and the best one with its command.

    Attributes:
        in_file: Flags that stand in the file of ``--config`` and must go for the best way.
        notes: What the profile has only as a guess.
    """

    ways: list[PlannedWay]
    best: PlannedWay
    command: str
    in_file: list[str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain values; of each way's steps only how many there are."""
        return {
            "ways": [_plain(way) for way in self.ways],
            "best": _plain(self.best),
            "command": self.command,
            "not_in_config_file": self.in_file,
            "notes": list(self.notes),
        }


def simulate_command(
    profile: Profile,
    settings: Settings,
    words: Sequence[str],
    *,
    gpus_per_node: int,
    on_way: Callable[[int, int], None],
) -> WaysCompared:
    """Simulate a command, whose words are those after ``slime-launch train``, and its other ways.

    ``on_way`` hears how many are done, and of how many.

    Raises:
        ProfileError: The profile does not fit the command.
    """
    ways = try_ways(profile, settings, gpus_per_node=gpus_per_node, on_way=on_way)
    best = best_of(ways)
    return WaysCompared(
        ways=ways,
        best=best,
        command=command_of(best, words, gpus_per_node=gpus_per_node),
        in_file=in_config_file(best, settings.origins),
        notes=profile.notes,
    )


def simulated_text(found: WaysCompared, picture: Path) -> str:
    """The table, and what to run."""
    own = next(way for way in found.ways if way.is_own)
    gain = found.best.outcome.samples_per_second / own.outcome.samples_per_second
    ahead = "takes turns" if found.best.ahead is None else f"--async-buffer-size {found.best.ahead}"
    rows = [TITLES, *(_cells(way, found.best) for way in found.ways)]
    lines = [
        f"simulated: {len(own.outcome.ends)} steps of {len(found.ways)} ways to run this on the same GPUs",
        *(f"  {line}" for line in aligned(rows, range(11)).splitlines()),
        "",
        "train, generate: GPUs; ahead: --async-buffer-size; stale: versions between a sample's oldest token and the",
        "weights it trains, mean and most; again: part of the samples that were generated again as too old",
        "",
        "this command is the best of them" if found.best.is_own else _said(found.best, ahead, gain),
        f"  {found.command}",
    ]
    if found.in_file:
        lines.append(f"  and leave {', '.join(found.in_file)} out of the file of --config")
    if found.notes:
        lines += ["", "guesses in the profile", *(f"  {note}" for note in found.notes)]
    return "\n".join([*lines, "", f"picture  {picture}"])


def _said(best: PlannedWay, ahead: str, gain: float) -> str:
    where = f"{best.actor_gpus} GPUs shared" if best.shared else f"{best.actor_gpus} + {best.rollout_gpus} GPUs"
    return f"best: {where}, {ahead}, {gain:.2f} times as fast as this command"


def _cells(way: PlannedWay, best: PlannedWay) -> list[str]:
    outcome = way.outcome
    marks = (("this command", way.is_own), ("best", way is best))
    return [
        str(way.actor_gpus),
        "shared" if way.shared else str(way.rollout_gpus),
        "-" if way.ahead is None else str(way.ahead),
        f"{outcome.steps_per_hour:,.1f}",
        f"{outcome.samples_per_second:,.2f}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{outcome.trainers_idle:.0%}",
        f"{outcome.engines_idle:.0%}",
        f"{outcome.mean_staleness:.1f}",
        str(outcome.most_staleness),
        f"{outcome.again:.0%}",
        ", ".join(word for word, is_so in marks if is_so),
    ]


def save_picture(found: WaysCompared, path: Path) -> None:
    """Throughput, idle shares and staleness over the GPUs that generate, a line for each ``--async-buffer-size``."""
    from matplotlib.figure import Figure

    split = [way for way in found.ways if not way.shared]
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (title, name) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for ahead in dict.fromkeys(way.ahead for way in split):
            points = sorted((way.rollout_gpus, getattr(way.outcome, name)) for way in split if way.ahead == ahead)
            label = "take turns" if ahead is None else f"{ahead} ahead"
            axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.2, label=label)
        for way in (way for way in found.ways if way.shared):
            axes.axhline(getattr(way.outcome, name), linestyle="--", color="gray", label="shared GPUs")
        best = found.best
        if not best.shared:
            star = {"markersize": 16, "color": "black", "label": "best", "zorder": 0}
            axes.plot(best.rollout_gpus, getattr(best.outcome, name), "*", **star)
        axes.set(xlabel="GPUs that generate", ylabel=title, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def _plain(way: PlannedWay) -> dict[str, Any]:
    values = dataclasses.asdict(way)
    figures: dict[str, Any] = values.pop("outcome")
    steps = len(figures.pop("ends"))
    return {**values, "steps": steps, **figures}
