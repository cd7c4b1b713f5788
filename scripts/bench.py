"""Run benchmarks, print a table, and compare with the committed figures. Started by `scripts/bench`.

    scripts/bench                         all of them
    scripts/bench quickstart_vs_trl       one
    scripts/bench --full NAME             the largest runs, too
    scripts/bench --list                  what there is

Figures and facts about the machine go to outputs/bench/NAME.json. `ratio` is this run over the committed one in
benchmarks/baselines/NAME.json, which names its machine too: on another one, compare figures that are ratios themselves.
With --quick there is no `ratio`: its sizes are not those of the committed runs. Several run two at a time then.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks_page

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
OUTPUTS = ROOT / "outputs" / "bench"
WORSE = 0.8
STOP_SECONDS = 30.0
QUICK_AT_ONCE = 2
VERSIONS = ("torch", "megatron-core", "transformers", "ray", "sglang-router")


def main(argv: Sequence[str]) -> int:
    """Run what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run [all]")
    parser.add_argument("--list", action="store_true", help="say what there is")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="the smallest run that measures something")
    sizes.add_argument("--full", action="store_true", help="the largest runs, too, of benchmarks that have such")
    parser.add_argument("--save-baseline", action="store_true", help="keep these figures as the ones to compare with")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = {path.stem: path for path in sorted(BENCHMARKS.glob("[!_]*.py"))}
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.list:
        print("\n".join(f"{name:<24} {first_line(path)}" for name, path in known.items()))
        return 0
    if not args.inside:
        from slime_rollout.supervise import under_supervisor

        with under_supervisor([sys.executable, __file__, "--inside", *argv], grace=STOP_SECONDS) as wait:
            return wait()
    names = args.names or list(known)
    if len(names) > 1:
        flags = [word for word in argv if word.startswith("--")]
        return run_each(names, [sys.executable, __file__, *flags], at_once=QUICK_AT_ONCE if args.quick else 1)
    sys.path.append(str(BENCHMARKS))
    [name] = names
    result = run(name, quick=args.quick, full=args.full)
    path = write(name, result, OUTPUTS)
    before = {} if args.quick else baseline(name)  # of the whole size
    print(f"\n{name}\n{table(result['records'], before)}\n{path}", flush=True)
    if args.save_baseline:
        print(write(name, result, BENCHMARKS / "baselines"))
        benchmarks_page.PAGE.write_text(benchmarks_page.page(), encoding="utf-8")
    return 0


def run_each(names: Sequence[str], command: Sequence[str], *, at_once: int = 1) -> int:
    """Run benchmarks, each in a process of its own, and say what they took; returns the first one's code that failed.

    What one imports, or tells torch, would be there for the next.

    Args:
        names: Of the benchmarks.
        command: What runs one, but for its name.
        at_once: How many run at the same time. What one of several prints comes when it has ended.
    """

    def one(name: str) -> tuple[int, str]:
        began = time.monotonic()
        together: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if at_once > 1 else {}
        done = subprocess.run([*command, name], text=True, errors="replace", **together)
        print(done.stdout or "", end="", flush=True)
        code = done.returncode
        return code, f"{name:<24} {time.monotonic() - began:7.1f} s" + (f"  exit code {code}" if code else "")

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(one, names))
    print("\n" + "\n".join(line for _, line in results), flush=True)
    return next((code for code, _ in results if code), 0)


def run(name: str, *, quick: bool, full: bool = False) -> dict[str, Any]:
    """Run one benchmark.

    Args:
        name: Of its file.
        quick: The smallest run that measures something.
        full: The largest runs, too.

    Returns:
        `machine`: facts; `quick`; `records`: a list of `case`, `metric`, `value`, `unit`, `more_is_better`, `goal`.
    """
    print(f"{name}: {first_line(BENCHMARKS / f'{name}.py')}", flush=True)
    out = OUTPUTS / name
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    main = importlib.import_module(name).main
    further = {"full": full} if "full" in inspect.signature(main).parameters else {}
    records = main(out, quick=quick, **further)
    return {"machine": machine(), "quick": quick, "records": [dataclasses.asdict(record) for record in records]}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def baseline(name: str) -> Mapping[tuple[str, str], float]:
    """The committed figures by case and metric; empty without any."""
    path = BENCHMARKS / "baselines" / f"{name}.json"
    if not path.exists():
        return {}
    records = json.loads(path.read_text(encoding="utf-8"))["records"]
    return {(record["case"], record["metric"]): record["value"] for record in records}


def table(records: Sequence[Mapping[str, Any]], before: Mapping[tuple[str, str], float]) -> str:
    """The figures as aligned text: `worse` marks what lost a fifth against the committed one, `missed` a missed goal.

    Args:
        records: As in the JSON files.
        before: From :func:`baseline`.
    """
    goals = any(record.get("goal") is not None for record in records)
    rows = [("case", "metric", "value", "unit", *(["goal"] if goals else []), "baseline", "ratio", "")]
    for record in records:
        old = before.get((record["case"], record["metric"]))
        ratio = record["value"] / old if old else None
        shown = ("" if old is None else f"{old:.3f}", "" if ratio is None else f"{ratio:.2f}")
        marks = [
            *(["worse"] if ratio is not None and is_worse(ratio, record["more_is_better"]) else []),
            *(["missed"] if misses_goal(record) else []),
        ]
        goal = [goal_text(record)] if goals else []
        value = f"{record['value']:.3f}"
        rows.append((record["case"], record["metric"], value, record["unit"], *goal, *shown, ", ".join(marks)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numbers = {2, *range(4, len(rows[0]) - 1)}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def goal_text(record: Mapping[str, Any]) -> str:
    """A figure's goal, such as `<= 50`; empty without one."""
    goal = record.get("goal")
    return "" if goal is None else f"{'>=' if record['more_is_better'] else '<='} {goal:g}"


def misses_goal(record: Mapping[str, Any]) -> bool:
    """Whether a figure has a goal and does not reach it."""
    goal, value = record.get("goal"), record["value"]
    return goal is not None and (value < goal if record["more_is_better"] else value > goal)


def is_worse(ratio: float, more_is_better: bool | None) -> bool:
    """Whether a figure lost more than a fifth against its baseline."""
    if more_is_better is None:
        return False
    return ratio < WORSE if more_is_better else ratio > 1 / WORSE


def write(name: str, result: Mapping[str, Any], directory: Path) -> Path:
    """Write a result; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def first_line(path: Path) -> str:
    """The first line of a file's docstring, without importing it."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
