"""What shows the API key of a run, and what its servers answer without it."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ended import End
from launching import listening

SERVERS = {"sglang.launch_server": "/model_info", "sglang::router": "/workers"}


def status(url: str, key: str | None) -> int:
    """The HTTP status of a GET with a key, or without one."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@dataclass
class KeySeen:
    """What was seen of a run's key.

    Attributes:
        keys: The keys that its processes have.
        answers: Each server's status without a key, with a wrong one, and with the run's.
        shown: Command lines that hold the key.
    """

    keys: set[str] = field(default_factory=set)
    answers: list[tuple[str, int, int, int]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    def then(self, end: End) -> End:
        """Look before a run is ended."""

        def look_and_end(family: list[psutil.Process]) -> None:
            self._look(family)
            end(family)

        return look_and_end

    def _look(self, family: list[psutil.Process]) -> None:
        for process in family:
            values = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
            self.keys.update(value.partition("=")[2] for value in values if value.startswith("SLIME_API_KEY="))
        [key] = self.keys
        lines = {process: " ".join(process.cmdline()) for process in family}
        for server, path in SERVERS.items():
            for _, host, port in listening([one for one, line in lines.items() if server in line]):
                tries = (status(f"http://{host}:{port}{path}", one) for one in (None, "wrong", key))
                self.answers.append((server, *tries))
        self.shown.extend(line for line in lines.values() if key in line)
