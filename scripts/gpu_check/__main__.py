"""The command line of `scripts/gpu-check`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_check
from gpu_check.cases import CHECKS
from gpu_check.machine import Machine, Row


def main(argv: list[str]) -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=gpu_check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what to compute on")
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, metavar="CHECK", help=f"instead of all: {', '.join(CHECKS)}"
    )
    parser.add_argument("--ranks", type=int, help="most ranks of a layout; as many as there are GPUs, or 2 on a CPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON, too")
    args = parser.parse_args(argv)
    import torch

    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and not gpus:
        print(
            "gpu-check: torch finds no GPU here, so nothing was run; --device cpu shows what a CPU can", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        machine = Machine(args.device, args.ranks or gpus or 2, Path(directory))
        try:
            rows = list(printed(run(machine, args.only or list(CHECKS))))
        finally:
            machine.stop()
    failed = sum(row.result == "MISMATCH" for row in rows)
    missing = sum(row.result.startswith("not run") for row in rows)
    print(f"\n{len(rows) - failed - missing} as expected, {failed} not, {missing} not run")
    if args.output:
        result = {"device": args.device, "machine": machine.facts, "rows": [vars(row) for row in rows]}
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


def run(machine: Machine, names: list[str]) -> Iterator[Row]:
    """The rows of the checks; what a check raises becomes a row."""
    facts = machine.facts
    print(f"{facts['gpu'] or 'CPU'}, up to {machine.most_ranks} ranks; {_versions(facts)}\n", flush=True)
    for name in names:
        yield from machine.guarded(name, CHECKS[name])


def _versions(facts: dict[str, Any]) -> str:
    known = [f"{name} {version or 'missing'}" for name, version in facts["versions"].items()]
    return ", ".join([*known, f"PyTorch's flash attention {'there' if facts['flash'] else 'missing'}"])


def printed(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, each printed when it is known."""
    print(f"{'check':<10} {'case':<44} {'value':>22} {'bound':>22}  result", flush=True)
    for row in rows:
        print(f"{row.check:<10} {row.case:<44} {row.value:>22} {row.bound:>22}  {row.result}", flush=True)
        yield row


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
