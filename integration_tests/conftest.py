"""Tiny models, and runs of them that several tests look at; each made once for all integration tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Joined, run_on_cluster
from ended import FOREVER, Ended, end_run, finish, send, trained
from launching import Assets, make_assets, train_command
from learning import ON_TWO_RANKS, learn
from resuming import ROLLOUTS, saving_command

LEARNING_ROLLOUTS = 30


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny Qwen3: untied embeddings, q and k norms."""
    return make_assets("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny Llama: tied embeddings."""
    return make_assets("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def whole_run(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Makes `ROLLOUTS` rollouts without a stop, then gets a SIGTERM."""
    work = tmp_path_factory.mktemp("whole")
    command = saving_command(llama, work, rollouts=FOREVER)
    return end_run(command, work, send(signal.SIGTERM), ready=trained(work, ROLLOUTS))


@pytest.fixture(scope="session")
def killed_run(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three rollouts are trained on, two of them are in the checkpoint: the third must be made good."""
    work = tmp_path_factory.mktemp("killed")
    return end_run(saving_command(llama, work), work, send(signal.SIGKILL), ready=trained(work, 3))


@pytest.fixture(scope="session")
def resumed_run(llama: Assets, killed_run: Ended) -> Ended:
    """The same command as the killed run's, in its directory, to the end."""
    work = killed_run.work
    command = saving_command(llama, work)
    log = "resumed.txt"
    return end_run(command, work, finish, ready=lambda: "\nstep " in (work / log).read_text(), log=log)


@pytest.fixture(scope="session")
def learned_run(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Learns on two ranks, then ends by ctrl-c."""
    return learn(qwen3, tmp_path_factory.mktemp("learned"), ON_TWO_RANKS)


@pytest.fixture(scope="session")
def external_fleet(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """One engine and a router that no run has started. Whoever uses them sends weights first."""
    engine = EngineConfig(
        sglang_python=qwen3.engine_python,
        engine_threads=1,
        sglang_args={"max-total-tokens": "8192", "max-running-requests": "64"},
    )
    with EngineFleet.start(
        engine,
        model_path=str(qwen3.hf),
        num_engines=1,
        dtype="float32",
        context_length=256,
        seed=1,
        log_dir=tmp_path_factory.mktemp("external"),
    ) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def joined_run(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Joined:
    """Learns on a Ray cluster that was there before, and finishes."""
    work = tmp_path_factory.mktemp("joined")
    command = train_command(qwen3, work, "--lr", "4e-3", rollouts=LEARNING_ROLLOUTS, save=False)
    return run_on_cluster(command, work, kill=False)
