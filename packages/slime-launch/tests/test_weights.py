"""What the loop does where engines die: weights are sent again, to whom they are missing, until nobody lacks them."""

from __future__ import annotations

import dataclasses
import io
import types
from collections.abc import Sequence

import pytest

from slime_core.types import Progress, SyncReport
from slime_launch import loop
from slime_launch.canary import Canary
from slime_launch.console import RunConsole
from slime_launch.handover import Handover, watching
from slime_launch.loop import Parts, wait_for
from slime_launch.resume import Due
from slime_launch.weights import Sending
from slime_rollout.engine import EngineDiedError, WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.generation_service import retry_delays
from slime_rollout.http import RETRY_DELAYS


class Rollout:
    """Engines by address, with their weights: ``None`` after a restart. Those in `doomed` die when weights come."""

    def __init__(self, *urls: str) -> None:
        self.weights: dict[str, int | None] = dict.fromkeys(urls)
        self.current: int | None = None
        self.doomed: list[str] = []
        self.silent: list[str] = []
        self.open: tuple[str, ...] | None = None
        self.blames_an_engine = True
        self.calls: list[str] = []

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        self.calls.append("behind" if only_behind else "all")
        assert self.open is None
        self.open = tuple(url for url in self.weights if not only_behind or self.weights[url] != self.current)
        urls, self.open = self.open, self.open or None
        return ChannelSpec(urls, sync=EngineConfig())

    def confirm_update(self, version: int) -> None:
        assert self.open and all(self.weights[url] == version for url in self.open)
        self.current, self.open = version, None

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        self.calls.append(f"{', '.join(silent)} silent" if silent else "failed")
        self.open = None
        return self.blames_an_engine

    def progress(self) -> Progress:
        return Progress(1, 2, behind=any(weights != self.current for weights in self.weights.values()))


class Trainers:
    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.pushed: list[tuple[tuple[str, ...], int]] = []

    def push_weights(self, channel, version, *, on_poll):
        on_poll()
        self.pushed.append((channel.engine_urls, version))
        for url in channel.engine_urls:
            if url in self.rollout.doomed:
                self.rollout.doomed.remove(url)
                del self.rollout.weights[url]
                self.rollout.weights[url + "'"] = None
                raise WeightSyncError(f"{url}: no answer", url=url, silent=self.rollout.silent)
            self.rollout.weights[url] = version
        return SyncReport(version=version, tensors=1, bytes=4, seconds=0.1)

    def check(self) -> None:
        pass


def parts(*urls: str, iteration: int = 4, version: int = 4) -> Parts:
    rollout, console = Rollout(*urls), RunConsole(io.StringIO())
    kind = types.SimpleNamespace(generates=True, trainer_sleeps=False, engines_sleep=False)
    settings = types.SimpleNamespace(kind=kind, num_rollout=3)
    trainers = Trainers(rollout)
    memory = Handover(kind, trainers, rollout, console)
    shape = types.SimpleNamespace(vocab_size=10, num_experts=None, moe_router_topk=None)
    return Parts(
        settings=settings,
        trainers=trainers,
        rollout=rollout,
        memory=memory,
        training=None,
        sending=Sending(trainers, rollout, memory, console, Canary(0.0, shape, trainers, rollout, memory), ahead=False),
        state=types.SimpleNamespace(iteration=iteration, weight_version=version, is_saving=False, is_exported=True),
        tracker=None,
        console=console,
    )


def test_weights_are_sent_again_where_an_engine_died_meanwhile():
    run = parts("a", "b")
    run.rollout.doomed = ["a", "b"]
    assert run.sending.push(3).version == 3
    assert run.trainers.pushed == [(("a", "b"), 3), (("b", "a'"), 3), (("a'", "b'"), 3)]
    assert run.rollout.weights == {"a'": 3, "b'": 3}
    assert run.rollout.calls == ["all", "failed", "all", "failed", "all"]


def test_engines_that_gave_no_answer_are_named():
    run = parts("a", "b", "c")
    run.rollout.doomed, run.rollout.silent = ["b"], ["b", "c"]
    run.sending.push(3)
    assert run.rollout.calls == ["all", "b, c silent", "all"]


def test_an_error_that_no_engine_is_to_blame_for_is_raised():
    run = parts("a", "b")
    run.rollout.doomed, run.rollout.blames_an_engine = ["a"], False
    with pytest.raises(WeightSyncError, match="a: no answer"):
        run.sending.push(3)
    assert len(run.trainers.pushed) == 1


def test_the_end_of_the_budget_ends_the_update():
    run = parts("a")
    run.rollout.doomed = ["a"]

    def fail_update(silent):
        raise EngineDiedError("engine 0 died once too often")

    run.rollout.fail_update = fail_update
    with pytest.raises(EngineDiedError, match=r"^engine 0 died once too often"):
        run.sending.push(3)


@pytest.mark.parametrize(
    ("iteration", "sent"),
    [(4, [(("b'",), 4), (("b''",), 4)]), (9, [(("a", "b'"), 9), (("a", "b''"), 9)])],
    ids=["those that the others have", "to all, where the others have older ones"],
)
def test_engines_that_were_replaced_amid_a_rollout_get_the_current_weights(iteration, sent):
    run = parts("a", "b", iteration=iteration, version=4)
    run.sending.push(4)

    class Generating:
        """Takes five moments; in the second an engine is replaced, and dies again when it gets the weights."""

        moments = 0

        def done(self):
            self.moments += 1
            if self.moments == 2:
                assert run.rollout.calls == ["all"]
                run.rollout.weights = {"a": 4, "b'": None}
                run.rollout.doomed = ["b'"]
            return self.moments > 5

        def results(self):
            return ["a rollout"]

    with run.console.wait("generate") as wait:
        assert wait_for(run, Generating(), wait) == "a rollout"
    assert run.trainers.pushed[1:] == sent
    assert run.rollout.weights == {"a": iteration, "b''": iteration} and run.state.weight_version == iteration


def test_engines_get_the_weights_before_the_trainers_are_busy_again_if_a_rollout_is_never_waited_for(monkeypatch):
    """An engine comes up during each push and each save; nobody may train or save while it is without weights."""
    run = parts("a", iteration=0, version=0)
    run.state.due = Due(push=True, save=True, evaluate=False)
    run.state.trained = lambda number: vars(run.state).update(iteration=number + 1, weight_version=number + 1)
    done = []

    def busy(what):
        assert not run.rollout.progress().behind
        assert set(run.rollout.weights.values()) == {run.state.weight_version}
        done.append(what)

    def train(batch):
        busy(f"train {batch}")

    def save(parts):
        busy(f"save {run.state.iteration}")
        run.rollout.weights[f"up amid save {run.state.iteration}"] = None

    push = run.trainers.push_weights

    def push_weights(channel, version, *, on_poll):
        report = push(channel, version, on_poll=on_poll)
        if "a" in channel.engine_urls:
            run.rollout.weights[f"up amid push {version}"] = None
        return report

    run.trainers.push_weights = push_weights
    monkeypatch.setattr(loop, "next_batch", lambda parts, rollout_id: rollout_id)
    monkeypatch.setattr(loop, "save_if_due", save)
    for name in ("record_spans", "restore_data_position", "evaluate_if_due", "record"):
        monkeypatch.setattr(loop, name, lambda *args: None)
    loop.run_loop(dataclasses.replace(run, training=types.SimpleNamespace(train=train)))
    assert done == ["train 0", "save 1", "train 1", "save 2", "train 2", "save 3"]


def test_trainers_that_are_busy_are_not_asked_for_weights():
    run = parts("a")
    with run.console.wait("train") as wait:
        watching(run.rollout, wait)()
    assert run.rollout.calls == []


def test_requests_are_tried_again_as_long_as_engines_may_be_replaced():
    assert retry_delays(EngineConfig()) == RETRY_DELAYS
    config = EngineConfig(use_fault_tolerance=True, rollout_max_restarts=1, engine_startup_timeout=100.0)
    assert 320.0 <= sum(retry_delays(config)) < 330.0
