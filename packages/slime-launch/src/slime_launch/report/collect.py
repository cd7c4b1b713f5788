"""The data of a report's page about a run, from the files in its directory; nothing else has to be there."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slime_core.errors import SlimeError
from slime_core.files import naming_damage, read_bytes, read_json
from slime_core.metrics import eval_scores
from slime_core.words import duration
from slime_launch.errors import PreflightError
from slime_launch.manifest import read_manifest
from slime_launch.metric_names import entry_of, table
from slime_launch.report.samples import read_kept
from slime_launch.report.summary import HELD_OUT_LOSS, REPORT_FILE, REWARD, scores_of
from slime_launch.report.timeline import lanes_of, timeline
from slime_launch.resolved import FILE_NAME as SETTINGS_FILE
from slime_launch.tracking import METRICS_FILE, Row, read_rows
from slime_rollout.service import SAMPLES_DIR

Data = dict[str, Any]
MOST_POINTS = 2000
"""Of a curve; of more rows, so many that are evenly spread."""
STDERRS = 1.96  # of a 95 % interval
QUIET_SECONDS = 600.0
"""A run that is not finished is taken for stopped when it has written nothing for so long."""
CHARTS = (
    ("Reward", "rollout", ("rollout/raw_reward",), ""),
    ("Further parts of the reward", "rollout", ("rollout/reward/<part>",), ""),
    ("Held-out score", "eval", (), ""),
    ("Loss", "train", ("train/loss",), ""),
    ("KL", "train", ("train/kl_loss", "train/ppo_kl"), "nats"),
    ("Entropy", "train", ("train/entropy_loss",), "nats"),
    ("Gradient norm", "train", ("train/grad_norm",), ""),
    ("Response length", "rollout", ("rollout/response_len/mean", "rollout/response_len/max"), "tokens"),
    ("Drift of log-probs, engine and trainer", "train", ("train/train_rollout_logprob_abs_diff",), "nats"),
    ("Throughput", "rollout", ("perf/tokens_per_second",), "tokens/s"),
    ("Idle share of the trainers", "rollout", ("perf/wait_time_ratio",), ""),
    ("Time of a step", "rollout", ("perf/step_time", "perf/rollout_time", "perf/train_time"), "s"),
    ("Staleness", "rollout", ("rollout/staleness/mean", "rollout/staleness/max"), "versions"),
    ("Groups with equal rewards", "rollout", ("rollout/zero_std/ratio",), ""),
)
"""The charts that are shown first: title, kind of row, metrics as the table of names has them, unit."""


ANY_OUTPUT = ("out", "output", "outputs", "result", "results", "run")
"""Names of directories that say nothing about the run."""


def report_data(directories: Sequence[Path], *, live: bool = False) -> Data:
    """The data of a page about one run, or about several side by side.

    Raises:
        PreflightError: A directory holds no run.
    """
    names = _names(directories)
    runs = [run_data(directory, name) for directory, name in zip(directories, names, strict=True)]
    return {"slime": version("slime-launch"), "made": time.time(), "live": live, "runs": runs}


def run_data(directory: Path, name: str) -> Data:
    """The data of one run."""
    rows, found = read_rows(directory), _read_json(directory / SETTINGS_FILE)
    if not rows and not found:
        raise PreflightError(
            f"{directory} holds neither {METRICS_FILE} nor {SETTINGS_FILE}; give the --output-dir of a run"
        )
    with naming_damage(directory / SETTINGS_FILE):
        entries = {key: (value["value"], value["origin"]) for key, value in found.get("settings", {}).items()}
        command, shown = _command(entries), [[key, _text(value), origin] for key, (value, origin) in entries.items()]
    settings = {key: value for key, (value, _) in entries.items()}
    with naming_damage(directory / METRICS_FILE):
        lanes = lanes_of(rows, directory / "logs", overlaps=settings.get("async_buffer_size") is not None)
        times = [row["time"] for row in rows]
        began = min([*times[:1], *(spans[0].start for spans in lanes.values())], default=0.0)
        ended = max(times, default=began)
        # An evaluation's number is that of the rollout after it.
        last = max((row["rollout_id"] for row in rows if row["kind"] != "eval"), default=-1)
        curves = {kind: curve for kind in ("rollout", "train", "eval") if (curve := _curves(rows, kind))["x"]}
        evals = list(_evals(rows))
        headline, shown_lanes = list(_headline(rows, settings, evals, ended - began)), timeline(lanes, began)
    with naming_damage(directory / SAMPLES_DIR):
        samples, total = read_kept(directory / SAMPLES_DIR, last=last)
        staleness = _staleness(samples)
    with naming_damage(directory / REPORT_FILE):
        ledger = _ledger(directory, settings, rows)
    return {
        "name": name,
        "directory": str(directory),
        "state": _state(rows, settings, directory),
        "command": command,
        "began": began,
        "ended": ended,
        "headline": headline,
        "curves": curves,
        "titles": dict(_titles(curves)),
        "charts": list(_charts(curves)),
        "evals": evals,
        "timeline": shown_lanes,
        "ledger": ledger,
        "staleness": staleness,
        "samples": samples,
        "samples_total": max(total, (ledger or {}).get("generated", 0)),
        "settings": shown,
        "events": list(_events(directory / "logs" / "engine_events.jsonl")),
    }


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest end of each path that no other has, and that is more than a word for any run's output."""
    parts = [directory.resolve().parts for directory in directories]
    least = 1 + any(part[-1].lower() in ANY_OUTPUT for part in parts)
    for size in range(least, max(map(len, parts)) + 1):
        names = ["/".join(part[-size:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{directory} ({number})" for number, directory in enumerate(directories, 1)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def _state(rows: Sequence[Row], settings: dict[str, Any], directory: Path) -> str:
    done = sum(row["kind"] == "rollout" for row in rows)
    wanted = settings.get("num_rollout")
    if wanted is not None and done >= wanted:
        return "finished"
    written = [directory / METRICS_FILE, directory / SETTINGS_FILE, *directory.glob("logs/*.log")]
    newest = max((path.stat().st_mtime for path in written if path.is_file()), default=0.0)
    return "running" if time.time() - newest < QUIET_SECONDS else "stopped"


def _command(entries: dict[str, tuple[Any, str]]) -> str:
    """The flags that were given, as one command; those of a configuration file are among them."""
    words = []
    for key, (value, origin) in entries.items():
        if origin not in ("command line", "config file") or value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words.append(shlex.join([f"--{key.replace('_', '-')}", *map(str, values)]))
    return " \\\n  ".join(["slime-launch train", *words])


def _headline(
    rows: Sequence[Row], settings: dict[str, Any], evals: Sequence[Data], seconds: float
) -> Iterator[tuple[str, str]]:
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    wanted = settings.get("num_rollout")
    yield "steps", f"{len(rollouts)} of {wanted}" if wanted is not None else str(len(rollouts))
    if steps := sum(row["kind"] == "train" for row in rows):
        yield "optimizer steps", str(steps)
    yield "time", duration(seconds)
    if rewards := [row[REWARD] for row in rollouts if row.get(REWARD) is not None]:
        part = max(len(rewards) // 10, 1)
        yield "training reward", f"{sum(rewards[:part]) / part:.3f} → {sum(rewards[-part:]) / part:.3f}"
    for name in dict.fromkeys(one["set"] for one in evals):
        scores = [one["score"] for one in evals if one["set"] == name]
        yield name, f"{scores[0]:.3f} → {scores[-1]:.3f}" if len(scores) > 1 else f"{scores[0]:.3f}"
    if failed := sum(row.get("rollout/reward_failures") or 0.0 for row in rollouts):
        yield "samples that could not be scored", f"{failed:.0f}"


def _curves(rows: Sequence[Row], kind: str) -> Data:
    chosen = [row for row in rows if row["kind"] == kind]
    stride = -(-len(chosen) // MOST_POINTS) or 1
    chosen = chosen[::stride]
    names = dict.fromkeys(name for row in chosen for name in row if "/" in name)
    series = {name: [_short(row.get(name)) for row in chosen] for name in sorted(names)}
    # The file counts from 0; steps are counted from 1 where people read them, and an evaluation is after one.
    first = 0 if kind == "eval" else 1
    return {"x": [row["step"] + first for row in chosen], "series": series}


def _short(value: float | None) -> float | None:
    """Six digits: more is not seen."""
    return None if value is None else float(f"{value:.6g}")


def _titles(curves: Data) -> Iterator[tuple[str, str]]:
    known = {name: row["is"] for section in table().values() for name, row in section.items()}
    for curve in curves.values():
        for name in curve["series"]:
            if (entry := entry_of(name)) is not None:
                yield name, known[entry]


def _charts(curves: Data) -> Iterator[Data]:
    for title, kind, names, unit in CHARTS:
        series = curves.get(kind, {"series": {}})["series"]
        wanted = names if names else tuple(f"eval/{name}" for name in eval_scores(series))
        if not names and not wanted:  # rows of a data set have a loss
            title, wanted = "Held-out loss", tuple(name for name in series if HELD_OUT_LOSS.fullmatch(name))
        if there := [name for one in wanted for name in series if one in (name, entry_of(name))]:
            yield {"title": title, "kind": kind, "names": there, "unit": unit}


def _evals(rows: Sequence[Row]) -> Iterator[Data]:
    """Each score with its 95 % interval, as far as its standard error is known; or the loss of rows of a data set."""
    for row in rows:
        if row["kind"] != "eval":
            continue
        measure = "score" if eval_scores(row) else "loss"
        scores = {name: value for name, value in scores_of(row).items() if value is not None}
        for name, score in scores.items():
            start, stderr = f"eval/{name}", row.get(f"eval/{name}/stderr")
            shown = {f"eval/{one}" for one in scores} | ({f"{start}/loss"} if measure == "loss" else set())
            own = [key for key in row if key.startswith((f"{start}/", f"{start}-")) and key not in shown]
            half = None if stderr is None else STDERRS * stderr
            yield {
                "set": name,
                "measure": measure,
                "rollouts": row["rollout_id"],
                "score": _short(score),
                "low": None if half is None else _short(score - half),
                "high": None if half is None else _short(score + half),
                "metrics": {key.removeprefix(start)[1:]: _short(row[key]) for key in own},
            }


def _ledger(directory: Path, settings: dict[str, Any], rows: Sequence[Row]) -> Data | None:
    """Where every sample went, as the run's last words or else its last checkpoint has it, and why groups were dropped.

    A relative --save is looked for where the run was most likely started: above its directory.
    """
    counts, balances = _last_words(directory, sum(row["kind"] == "rollout" for row in rows))
    save: Any = settings.get("save")
    for root in directory.resolve().parents if counts is None and save is not None else ():
        manifest = None
        with contextlib.suppress(SlimeError):  # torn, or written by an older slime: show no ledger
            manifest = read_manifest(root / save) if (root / save).is_dir() else None
        if manifest is not None and manifest.source_state is not None:
            counts = manifest.source_state.get("ledger")
            balances = not (counts or {}).get("faults")
            break
    dropped: Counter[str] = Counter()
    start = "rollout/dynamic_filter/drop_"
    for row in rows:
        found = {key.removeprefix(start): value for key, value in row.items() if key.startswith(start)}
        dropped.update({reason: int(value) for reason, value in found.items() if value})
    if counts is None:
        return {"dropped": dropped} if dropped else None
    ended = {name: int(counts.get(name, 0)) for name in ("generated", "trained", "filtered", "aborted")}
    left = ended["generated"] - ended["trained"] - ended["filtered"] - ended["aborted"]
    stale = int(sum(row.get("rollout/stale_samples") or 0 for row in rows))
    return {**ended, "waiting": left, "stale": stale, "balances": balances, "dropped": dropped}


def _last_words(directory: Path, rollouts: int) -> tuple[dict[str, int] | None, bool]:
    """The ledger in ``report.json`` of a run that ended after so many rollouts, and whether it balances."""
    report = _read_json(directory / REPORT_FILE)
    if report.get("rollouts") == rollouts:  # else it was continued since
        return report.get("ledger"), bool(report.get("ledger_balances", True))
    return None, True


def _staleness(samples: Sequence[Data]) -> Data | None:
    """Tokens of the kept samples by how many versions they are older than the weights that trained on them."""
    counts: Counter[int] = Counter()
    for sample in samples:
        if sample["versions"] and sample["weight_version"] is not None and sample["dropped"] is None:
            counts.update(sample["weight_version"] - version for version in sample["versions"] if version >= 0)
    return {"versions": sorted(counts), "tokens": [counts[age] for age in sorted(counts)]} if counts else None


def _events(path: Path) -> Iterator[tuple[float, str, str]]:
    """Events of engines: seconds since 1970, which engine, what happened."""
    if not path.exists():
        return
    from datetime import datetime

    for line in read_bytes(path).splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            break
        with naming_damage(path):
            moment = datetime.fromisoformat(event["time"]).timestamp()
            yield round(moment, 1), str(event["engine"]), f"{event['event']} {event.get('detail', '')}".strip()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
