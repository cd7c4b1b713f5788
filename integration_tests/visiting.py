"""What exists because of a run, and what another user can do to it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ended import End
from launching import listening, rows, shared_memory

VISIT = "visit.json"
STEPS_SECONDS = 300.0
PROGRAM = Path(__file__).with_name("neighbour.py")
NOBODY_SECONDS = 300.0


def visited(end: End, work: Path) -> End:
    """Have another user try to get into a run before it is ended; what he could do is written to `VISIT`.

    The run must go on training meanwhile, and afterwards.
    """

    def visit(family: list[psutil.Process]) -> None:
        given = belongings(family)
        own = {"processes": given["processes"][-1:], "ray": given["ray"]}
        seen = {
            "given": given,
            "by nobody": done_by_nobody(given) if os.getuid() == 0 else [],
            "by its user": done_by_its_user({kind: [] for kind in given} | own, family),
        }
        (work / VISIT).write_text(json.dumps(seen))
        done_by_then, deadline = len(rows(work, "train")), time.monotonic() + STEPS_SECONDS
        while len(rows(work, "train")) < done_by_then + 2:
            assert time.monotonic() < deadline, "the run does not go on after the visit"
            time.sleep(0.2)
        end(family)

    return visit


def belongings(family: list[psutil.Process]) -> dict[str, Any]:
    """What a run consists of beside its --save and --output-dir, which colleagues may read."""
    private = {Path(given) for process in family for given in [environment(process).get("TMPDIR")] if given}
    # Below the outermost of the run's own folders lies everything else.
    tops = {path for folder in private for path in (folder, *folder.parents) if path.name.startswith("slime-ray-")}
    found = [path for top in tops for path in (top, *below(top))]
    kinds = {}
    for path in found:
        with suppress(OSError):  # it is gone again
            kinds[path] = path.lstat().st_mode
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    own = {number for process in family for number in socket_numbers(process)}
    named = {row[7] for row in rows if len(row) > 7 and row[6] in own}
    places = listening(family)
    return {
        "processes": [process.pid for process in family],
        "folders": [str(path) for path, mode in kinds.items() if stat.S_ISDIR(mode)],
        "files": [str(path) for path, mode in kinds.items() if stat.S_ISREG(mode)] + [*map(str, shared_memory(family))],
        "sockets": sorted(named | {str(path) for path, mode in kinds.items() if stat.S_ISSOCK(mode)}),
        "tcp": sorted({(host, port) for _, host, port in places}),
        "ray": sorted({(host, port) for command, host, port in places if "gcs_server" in command}),
    }


def environment(process: psutil.Process) -> dict[str, str]:
    """That a process began with."""
    with suppress(psutil.Error):
        return process.environ()
    return {}


def below(folder: Path) -> Iterator[Path]:
    """All that lies in a folder, however deep."""
    with suppress(OSError):
        for path in folder.iterdir():
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from below(path)


def socket_numbers(process: psutil.Process) -> Iterator[str]:
    """Inodes of the sockets that a process has open."""
    with suppress(OSError):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").removesuffix("]")


def done_by_nobody(given: dict[str, Any]) -> list[str]:
    """What the user of number 65534 could do, one line each."""
    return _done(given, [])


def done_by_its_user(given: dict[str, Any], family: list[psutil.Process]) -> list[str]:
    """What this user can do with the run's token."""
    token = next(token for process in family if (token := environment(process).get("RAY_AUTH_TOKEN")))
    return _done(given, ["--as-root"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)


def _done(given: dict[str, Any], words: list[str], **more: str) -> list[str]:
    program = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        input=json.dumps(given),
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | more,
        capture_output=True,
        text=True,
        timeout=NOBODY_SECONDS,
        cwd="/",
    )
    assert program.returncode == 0, program.stderr[-3000:]
    done: list[str] = json.loads(program.stdout.splitlines()[-1])
    return done
