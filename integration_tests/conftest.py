"""Tiny models, and runs of them that several tests look at; each made once for all integration tests."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineSpec
from slime_rollout.engine.template import imported_sglang

sys.path.insert(0, str(Path(__file__).parent))

from custom_turns import turns_command
from ended import FOREVER, Ended, end_run, kill_one, send, trained
from keys import KeySeen
from launching import Assets, make_assets
from learning import CTRL_C, ON_TWO_RANKS, learn
from story import ROLLOUTS, Story, story_command, tell
from visiting import visited

TOGETHER = (
    ("test_canary", "test_exactness", "test_external_engines"),
    ("test_handover", "test_key", "test_replay", "test_resume", "test_turns", "test_victims", "test_written_run"),
    ("test_learning", "test_listening", "test_neighbour"),
    ("test_pages", "test_quickstart", "test_real_model"),
)
"""Files that run in one process, one after the other: their tests look at the same runs or engines or, in the last row,
train a published model, which takes 8 GB. All other files stand alone."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (pytest-xdist), tests that share runs are in one of them, in order; so is each file."""
    from xdist.scheduler import LoadScopeScheduling

    class RunsTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem
            return next((files[0] for files in TOGETHER if name in files), name)

    return RunsTogether(config, log)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny Qwen3: untied embeddings, q and k norms."""
    return make_assets("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny Llama: tied embeddings."""
    return make_assets("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def undisturbed_story(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, KeySeen]:
    """What was seen of the run of `story.py` that nothing happens to; it goes on after `ROLLOUTS`, to a SIGTERM."""
    work = tmp_path_factory.mktemp("whole")
    command = story_command(llama, work, "--check-weight-update-equal", rollouts=FOREVER, colocate=True)
    seen = KeySeen()
    end = seen.then(send(signal.SIGTERM))
    return end_run(command, work, end, ready=trained(work, ROLLOUTS)), seen


@pytest.fixture(scope="session")
def whole_run(undisturbed_story: tuple[Ended, KeySeen]) -> Ended:
    """The run of `story.py` that nothing happens to."""
    return undisturbed_story[0]


@pytest.fixture(scope="session")
def story(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The run of `story.py` that is struck, killed and continued."""
    return tell(llama, tmp_path_factory.mktemp("story"))


@pytest.fixture(scope="session")
def killed_run(story: Story) -> Ended:
    """Three rollouts are trained on, two of them are in the checkpoint: the third must be made good."""
    return story.killed


@pytest.fixture(scope="session")
def resumed_run(story: Story) -> Ended:
    """The same command as the killed run's, in its directory, to the end."""
    return story.finished


@pytest.fixture(scope="session")
def crashed_run(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Trains twice on turns, parts and texts of a custom generate function; then its engine is killed."""
    work = tmp_path_factory.mktemp("crashed")
    command = turns_command(llama, work, "--trainer-max-restarts", "0", rollouts=FOREVER)
    return end_run(command, work, kill_one("sglang.launch_server"), ready=trained(work, 2))


@pytest.fixture(scope="session")
def learned_run(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Learns on two ranks, is visited by another user, then ends by ctrl-c. Its umask forbids nobody anything."""
    work, umask = tmp_path_factory.mktemp("learned"), os.umask(0)
    try:
        return learn(qwen3, work, ON_TWO_RANKS, end=visited(CTRL_C, work))
    finally:
        os.umask(umask)


@pytest.fixture(scope="session")
def engine_config(qwen3: Assets) -> Iterator[EngineConfig]:
    """Of engines that tests start by themselves: they are forked, as those of a run are."""
    config = EngineConfig(sglang_python=qwen3.engine_python, engine_threads=1)
    with imported_sglang(config, EngineSpec(model_path=str(qwen3.hf))) as forking:
        yield forking


@pytest.fixture(scope="session")
def external_fleet(
    qwen3: Assets, engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineFleet]:
    """One engine and a router that no run has started. Whoever uses them sends weights first."""
    sizes = {"max-total-tokens": "8192", "max-running-requests": "64"}
    with EngineFleet.start(
        dataclasses.replace(engine_config, sglang_args=sizes),
        model_path=str(qwen3.hf),
        num_engines=1,
        dtype="float32",
        context_length=256,
        seed=1,
        log_dir=tmp_path_factory.mktemp("external"),
    ) as fleet:
        yield fleet
