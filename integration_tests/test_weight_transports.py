"""Every way by which new weights can reach the engines, in the whole loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Assets, rows, run, train_command

from slime_rollout.weights import verify_checkpoint

DISK = ["--update-weight-transport", "disk", "--update-weight-disk-dir"]
ROLLOUTS = 2


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["gloo", "disk", "delta", "delta elsewhere"])
def test_the_loop_goes_on_whatever_carries_its_weights(llama: Assets, tmp_path: Path, transport: str) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    words = ["--update-weight-transport", "gloo"] if transport == "gloo" else [*DISK, str(shared)]
    if transport == "delta":
        words += ["--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", str(local)]
    receiver = None
    if transport == "delta elsewhere":
        receiver, url = start_receiver(llama, shared, local)
        words += ["--update-weight-mode", "delta", "--update-weight-receivers", url.removeprefix("http://")]
    words += ["--check-weight-update-equal", "--update-weight-pause-mode", "in_place"]
    command = train_command(llama, tmp_path, *words, rollouts=ROLLOUTS, save=False)
    try:
        text = run(command, tmp_path / "log.txt")
    finally:
        if receiver is not None:
            receiver.terminate()
            receiver.communicate(timeout=20)
    steps = rows(tmp_path, "train")
    assert len(steps) == ROLLOUTS, text
    difference = steps[-1]["train/train_rollout_logprob_abs_diff_max"]
    print(f"{transport}: after an update, log-probs of engine and trainer differ by {difference:.1e} at most")
    assert difference < 1e-4
    assert steps[-1]["train/kl_loss"] > 1e-3  # from the weights that it began with
    last = f"weight_v{ROLLOUTS:06d}"
    if transport == "disk":
        assert [path.name for path in shared.iterdir()] == [last] and verify_checkpoint(shared / last)
    if transport.startswith("delta"):
        assert (shared / last).is_dir()
        assert [path.name for path in local.iterdir()] == [last] and verify_checkpoint(local / last)


def start_receiver(llama: Assets, shared: Path, local: Path) -> tuple[subprocess.Popen[str], str]:
    """The command that would run on the engines' machine, and its address."""
    shared.mkdir()
    words = ["--from", str(shared), "--to", str(local), "--hf-checkpoint", str(llama.hf), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "slime_rollout", "receive-weights", *words]
    env = {name: value for name, value in os.environ.items() if name != "SLIME_API_KEY"}  # the run's key, by its hash
    receiver = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    return receiver, receiver.stdout.readline().split()[-1]
