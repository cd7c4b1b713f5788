"""Log-probs and entropies of 2,048 tokens × 151,936 ids: bf16, forward and backward, time and memory.

From hidden states: ours against TRL's chunked log-probs (as TRL calls it, and with chunks of 4,096 ids), verl's
`FusedLinearForPPO`, and the bare matrix products: logits, logits again, and the two gradients, into memory that is
there already. From logits: ours against `log_softmax` and `gather`. Sides alternate. A gradient reaches log-probs and
entropies, except from logits, where the other side has no entropies.

Times are CPU seconds of one thread, the least of the rounds, so that other work on the machine disturbs little. Goals
from hidden states: an eighth of the logits, 1.35 times the bare products (which compute the logits twice, as we do),
and 1.3 times as fast as the faster of the others with no more memory. From logits: once the logits, and no slower than
the other side. The gradient alone is once the logits; what comes on top is three rows in fp32 to compute in. With
`overwrite_logits`, as slime's trainer calls it, the gradient takes the logits' own place.

`extra` is the largest resident size during the call less that before it; for hidden states also less the gradients
that it returns, since every side returns them. Everything else counts, fp32 copies of gradients too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _records import Record

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "benchmarks" / "requirements-log-probs.txt"
OTHERS = ROOT / ".venv-log-probs"
TOKENS, VOCAB = 2048, 151_936
LIMIT_SECONDS = 3600.0


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure every case in a process of its own.

    Args:
        out: Directory for settings, results and the log.
        quick: A sixteenth of the vocabulary, where the goals say nothing, and hidden size 1,024 only.
    """
    install_others()
    vocab = VOCAB // 16 if quick else VOCAB
    records = []
    for hidden in (1024,) if quick else (1024, 4096):
        sides = ("bare", "ours", "trl", "trl, chunks of 4,096", "verl")
        measured = measure(out / f"hidden-{hidden}", "_log_probs_linear", sides, vocab, hidden, rounds=1)
        records += against_others(f"hidden {hidden:,}", measured, vocab)
    for dtype in ("bfloat16", "float32"):
        both = ("ours", "log_softmax", "ours, over the logits")
        measured = measure(out / dtype, "_log_probs_logits", both, vocab, dtype, 1 if quick else 3)
        records += against_log_softmax(f"logits {dtype}", measured)
    return [dataclasses.replace(record, goal=None) for record in records] if quick else records


Measured = Mapping[str, Mapping[str, float]]


def measure(out: Path, script: str, sides: Sequence[str], vocab: int, kind: int | str, rounds: int) -> Measured:
    """Seconds and extra bytes by side.

    Args:
        out: Directory to make, for settings, results and the log.
        script: Name of the file next to this one that runs the sides.
        sides: What to run, in this order in each round.
        vocab: Vocabulary ids.
        kind: Hidden size, or type of the logits.
        rounds: How often each side runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings = {"sides": sides, "tokens": TOKENS, "vocab": vocab, "kind": kind, "rounds": rounds, "others": str(OTHERS)}
    (out / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-u", str(ROOT / "benchmarks" / f"{script}.py"), str(out)]
    print(f"{script.removeprefix('_log_probs_')} {kind}: {rounds} rounds of {', '.join(sides)}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (out / "log.txt").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_SECONDS, env=environment)
    if done.returncode != 0:
        tail = "\n".join((out / "log.txt").read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{script} ended with exit code {done.returncode}:\n{tail}")
    measured: Measured = json.loads((out / "result.json").read_text())
    return measured


def against_others(case: str, measured: Measured, vocab: int) -> list[Record]:
    """Figures of each side, and what the goals speak of."""
    records, logits = [], 2.0 * TOKENS * vocab
    for side, figures in measured.items():
        records.append(Record(f"{case}: {side}", "time", figures["seconds"], "s", more_is_better=False))
        if side != "bare":
            records.append(Record(f"{case}: {side}", "extra", figures["extra"] / 2**20, "MiB", more_is_better=False))
    ours = measured["ours"]
    others = [figures for side, figures in measured.items() if side not in ("ours", "bare")]
    best, least = (min(figures[field] for figures in others) for field in ("seconds", "extra"))
    return [
        *records,
        Record(f"{case}: ours / bare", "time", ours["seconds"] / measured["bare"]["seconds"], "x", False, 1.35),
        Record(f"{case}: best of others / ours", "time", best / ours["seconds"], "x", True, 1.3),
        Record(f"{case}: ours / least of others", "extra", ours["extra"] / least, "x", False, 1.0),
        Record(f"{case}: ours / bf16 logits", "extra", ours["extra"] / logits, "x", False, 1 / 8),
    ]


def against_log_softmax(case: str, measured: Measured) -> list[Record]:
    """Seconds and memory of both sides; here the gradient counts, being as large as the logits."""
    records = []
    for side, figures in measured.items():
        records.append(Record(f"{case}: {side}", "time", figures["seconds"], "s", more_is_better=False))
        share, goal = figures["extra"] / figures["logits"], 1.0 if side.startswith("ours") else None
        records.append(Record(f"{case}: {side} / logits", "extra", share, "x", False, goal))
    ours = measured["ours"]
    besides = (ours["extra"] - ours["logits"]) / 2**20
    records.append(Record(f"{case}: ours besides the gradient", "extra", besides, "MiB", more_is_better=False))
    ratio = measured["log_softmax"]["seconds"] / ours["seconds"]
    return [*records, Record(f"{case}: log_softmax / ours", "time", ratio, "x", True, 1.0)]


def install_others() -> None:
    """`.venv-log-probs`, a directory with both packages' files, unless it is there."""
    stamp = OTHERS / "installed.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    print("directory .venv-log-probs: TRL and verl", flush=True)
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(OTHERS)]
    subprocess.run([*install, "--requirement", str(REQUIREMENTS)], check=True, cwd=ROOT)
    stamp.write_text(REQUIREMENTS.read_text())
