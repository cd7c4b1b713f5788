"""An engine that does not come up is told with the end of its log; nothing is left but the logs."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import psutil
import pytest
from launching import RUN_SECONDS, Assets, started, train_command


def _marked(mark: str) -> list[str]:
    """Processes that were started with a value in their environment, wherever they hang; this one left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SLIME_TEST_MARK") == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return found


NO_SUCH_MODEL = '{"architectures": ["NoSuchModel"]}'


@pytest.mark.real
@pytest.mark.timeout(900)
def test_an_engine_that_does_not_come_up(qwen3: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("SLIME_TEST_MARK", mark)
    command = train_command(qwen3, tmp_path, "--sglang-json-model-override-args", NO_SUCH_MODEL, rollouts=1)
    with started(command, tmp_path / "log.txt") as process:
        code = process.wait(RUN_SECONDS)
    text = (tmp_path / "log.txt").read_text()
    assert code == 2, text
    message = text[text.index("slime-launch: ") :]
    print(message)
    assert "engine_0.log" in message and "NoSuchModel" in message
    assert "Traceback" not in text
    assert _marked(mark) == []
    assert not (tmp_path / "save").exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"logs", "run.lock", "settings.json"}
