"""One run that many tests look at: struck, killed, continued three times; and the same run, which nothing happens to.

A tool answers between the turns of each sample. The struck run keeps engine and trainer apart; the other one has them
take turns in memory. Both must end equal, to the last bit.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from called_turns import HOLD
from ended import Ended, end_run, finish, send, trained
from launching import Assets
from striking import Strike, are_struck, command_of, run

ROLLOUTS, SAMPLES = 5, 16
"""Rollouts of the run, and samples of each."""
HELD = 3
"""The rollout in which the tool does not answer until the run was killed: two before it are in the checkpoint."""
STARTS: list[list[Strike]] = [  # what happens in each start; the launcher is killed in the first one
    [("the router dies", 0, "prefill"), ("a trainer rank dies", 0, "push")],
    [("the rollout actor dies", HELD, "write-down")],
    [("an engine dies", HELD + 1, "decode")],
]


@dataclass(frozen=True)
class Start:
    """One start of the struck run: exit code, what it printed, the strikes of it that were seen."""

    code: int
    text: str
    struck: set[int]


@dataclass(frozen=True)
class Story:
    """The struck run.

    Attributes:
        work: Its directory.
        starts: Its starts, in order.
        killed: The first start, which was killed with SIGKILL during the turns of rollout `HELD`.
        finished: The last start, which came to the end.
        answered: The calls of the tool in that rollout whose results were written down when it was killed.
        asked: How many calls the tool had got by then.
    """

    work: Path
    starts: list[Start]
    killed: Ended
    finished: Ended
    answered: set[tuple[int, int]]
    asked: int


def story_command(
    assets: Assets, work: Path, *more: str, rollouts: int = ROLLOUTS, colocate: bool = False
) -> list[str]:
    """The command of both runs. Only where engine and trainer are apart, something strikes."""
    strikes = [] if colocate else [one for start in STARTS for one in start]
    flags = ["--custom-generate-function-path", str(Path(__file__).with_name("called_turns.py")), "--max-turns", "3"]
    flags += ["--rollout-max-response-len", "40", "--save-interval", "2", "--rollout-shuffle", "--keep-rollouts"]
    flags += ["--sglang-log-level-http", "info"]
    return command_of(assets, work, strikes, *flags, *more, rollouts=rollouts, colocate=colocate)


def tell(assets: Assets, work: Path) -> Story:
    """Have the struck run happen."""
    command = story_command(assets, work)
    (work / HOLD).write_text(str(HELD * SAMPLES))
    first, last = set[int](), set[int]()

    def is_held() -> bool:
        first.update(are_struck(work))
        return len(answered(work, HELD * SAMPLES)) >= SAMPLES

    def is_trained() -> bool:
        last.update(are_struck(work))
        return trained(work, ROLLOUTS)()

    killed = end_run(command, work, send(signal.SIGKILL), ready=is_held)
    known, asked = answered(work, HELD * SAMPLES), len(calls(work))
    (work / HOLD).unlink()
    code, text, middle = run(command, work, "continued.txt")
    assert code == 1, f"exit code {code}, and the rollout actor should have died\n{text[-6000:]}"
    finished = end_run(command, work, finish, ready=is_trained, log="finished.txt")
    starts = [Start(killed.code, killed.text, first), Start(code, text, middle)]
    starts.append(Start(finished.code, finished.text, last))
    return Story(work, starts, killed, finished, known, asked)


def calls(work: Path) -> list[tuple[int, int]]:
    """The calls that the tool got, in order: number of a sample, and turn."""
    path = work / "calls.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(index), int(turn)) for index, turn in map(str.split, lines)]


def answered(work: Path, first: int) -> set[tuple[int, int]]:
    """Calls, from this sample on, whose results are written down."""
    path = work / "save" / "turns.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    values = [json.loads(line)["value"] for line in lines if line.endswith(b"}")]
    results = [value[0] for value in values if isinstance(value, list)]
    return {(one["index"], one["turn"]) for one in results if one["index"] >= first}
