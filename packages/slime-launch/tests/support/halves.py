"""The two halves of a run as stand-ins whose numbers follow from their state alone, and a clock that may kill them."""

import dataclasses
import functools
import hashlib
import json
import pickle
import shutil
import types
from pathlib import Path

import numpy as np

from slime_core.memory import Held, MemoryState
from slime_core.metrics import rollout_metrics
from slime_core.types import Account, EvalReport, Progress, RolloutBatch, Sample, SleepReport, SyncReport, TrainReport
from slime_launch.errors import TrainerLostError
from slime_rollout.prepare import prepare_rollout, read_rollout


class Killed(BaseException):
    """What SIGKILL is here: nobody handles it."""


class Clock:
    """Counts the points at which a run may be killed, and kills it at one of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.deadly: int | None = None
        self.losses: list[int] = []

    def tick(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.deadly:
            raise Killed(name)
        if len(self.names) - 1 in self.losses:
            raise TrainerLostError(f"trainer rank 0 died: {name}")


def digest(*values: object) -> int:
    return int(hashlib.sha256(repr(values).encode()).hexdigest()[:8], 16)


def seen_by(weights: int, rows) -> list[float]:
    """What weights make of tokens."""
    return [-float(digest(weights, row, place) % 97) for row in map(list, rows) for place in range(1, len(row))]


@dataclasses.dataclass
class Engine:
    engine_urls: tuple[str, ...] = ("http://engine",)
    weights: int | None = None


class Half:
    """Checks every move of its memory as the real ones do, and may be killed before and after each."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name, self.memory = clock, name, MemoryState(name)

    def sleep(self, *, keep_weights: bool = False, on_poll=lambda: None):
        self.clock.tick(f"{self.name}: sleep{' half' * keep_weights}")
        with self.memory.sleeping(keep_weights):
            on_poll()
        self.clock.tick(f"{self.name}: asleep{' half' * keep_weights}")
        return SleepReport(device=0, waiting=16, resident=100)

    def wake(self, *, weights_only: bool = False, on_poll=lambda: None) -> None:
        self.clock.tick(f"{self.name}: wake{' half' * weights_only}")
        with self.memory.waking(weights_only):
            on_poll()
        self.clock.tick(f"{self.name}: awake{' half' * weights_only}")


class Call:
    """Ends at the second look."""

    def __init__(self, result) -> None:
        self.result, self.looks = result, 0

    def results(self):
        return [self.result()]

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


class Rollout(Half):
    """Generates what follows from the data position and from the weights that were sent last."""

    def __init__(self, clock: Clock, spec) -> None:
        super().__init__(clock, "engines")
        self.spec = spec
        self.engine, self.position, self.version, self.behind = Engine(), 0, 0, False

    problem = None

    def sleep(self, *, keep_weights: bool = False) -> None:
        super().sleep(keep_weights=keep_weights)
        if not keep_weights:
            self.engine.weights = None

    def begin_update(self, *, only_behind: bool = False) -> Engine | types.SimpleNamespace:
        self.memory.require("begin_update", Held.WEIGHTS)
        return types.SimpleNamespace(engine_urls=()) if only_behind and not self.behind else self.engine

    def canary_log_probs(self, urls, tokens):
        self.memory.require("canary_log_probs", Held.EVERYTHING)
        self.clock.tick("canary")
        return Call(lambda: {url: seen_by(self.engine.weights, tokens.rows) for url in urls})

    def confirm_update(self, version: int) -> None:
        assert self.engine.weights is not None
        self.version, self.behind = version, False

    def cancel(self) -> None:
        self.clock.tick("cancel")

    def prepare(self, rollout_id):
        self.clock.tick(f"generate {rollout_id}")
        put = self.no_object_store
        return Call(lambda: prepare_rollout(self.generated(rollout_id), self.spec, state_dict=self.state_dict, put=put))

    def read(self, rollout_id):
        put = self.no_object_store
        return Call(lambda: read_rollout(rollout_id, self.spec, load_state_dict=self.load_state_dict, put=put))

    def no_object_store(self, shard):
        return pickle.loads(pickle.dumps(shard))

    def generated(self, rollout_id):
        self.memory.require("generate", Held.EVERYTHING)
        assert self.engine.weights is not None
        groups = [
            [self.sample(group * 2 + member, group, self.position, self.engine.weights) for member in range(2)]
            for group in range(4)
        ]
        self.position += 1
        metrics = rollout_metrics([sample for group in groups for sample in group])
        return RolloutBatch(rollout_id=rollout_id, groups=groups, weight_version=self.version, metrics=metrics)

    def sample(self, index: int, group: int, *state: int) -> Sample:
        token = digest(index, *state) % 97
        return Sample(
            index=index, group_index=group, prompt="p", tokens=[1, token], response_length=1, reward=float(token % 2)
        )

    def evaluate(self, iteration):
        self.clock.tick(f"evaluate {iteration}")
        return Call(lambda: self.evaluated(iteration))

    def evaluated(self, iteration):
        self.memory.require("evaluate", Held.EVERYTHING)
        rate = digest(self.engine.weights) % 101 / 100
        self.clock.tick(f"evaluated {iteration}")
        metrics = {"eval/sums": rate, "eval/sums-pass@2": rate}
        return EvalReport(rollout_id=iteration, scores={"sums": rate}, metrics=metrics, samples={}, seconds=1.0)

    def account(self):
        counts = dict.fromkeys(("filtered", "aborted", "buffered", "out"), 0)
        return Account(counts | {"generated": 8 * self.position, "trained": 8 * self.position}, self.problem)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def progress(self) -> Progress:
        return Progress(behind=self.behind)


class Trainers(Half):
    """Weights that follow from everything they were trained on, in order."""

    data_parallel_size = 1
    in_background, writing, questions, finished_at = False, None, 0, ()

    def __init__(self, clock: Clock, save: Path, model: Path, resume_from: Path | None) -> None:
        super().__init__(clock, "trainers")
        self.save_dir, self.model, self.checks = save, model, 0
        self.load(resume_from)

    def load(self, resume_from):
        self.weights = json.loads((resume_from / "weights.json").read_text()) if resume_from else 1

    def restart(self, resume_from, *, on_poll):
        self.writing, self.weights = None, None
        self.memory = MemoryState("trainers")
        self.clock.tick("restart")
        on_poll()
        self.load(resume_from)

    def train(self, shards, *, on_poll):
        [shard] = shards
        self.memory.require("train", Held.EVERYTHING)
        self.clock.tick(f"train {shard.rollout_id}")
        on_poll()
        self.weights = digest(self.weights, [(sample.tokens.tolist(), sample.reward) for sample in shard.samples])
        self.clock.tick(f"trained {shard.rollout_id}")
        return TrainReport(rollout_id=shard.rollout_id, steps=[{"loss": self.weights / 2**32}])

    def push_weights(self, engine, version, *, on_poll):
        engine.weights = None
        self.memory.require("push", Held.WEIGHTS)
        self.clock.tick(f"push {version}")
        engine.weights = self.weights
        return SyncReport(version=version, tensors=1, bytes=4, seconds=0.1)

    def log_probs(self, shard, *, on_poll):
        self.memory.require("log_probs", Held.WEIGHTS)
        return [np.array(seen_by(self.weights, [one.tokens.tolist()]))[-one.response_length :] for one in shard.samples]

    def inspect(self, engine, version, *, on_poll):
        self.memory.require("push", Held.WEIGHTS)
        self.clock.tick("inspect")
        return []

    def save(self, iteration, *, on_poll):
        self.memory.require("save", Held.EVERYTHING)
        if not self.in_background:
            return self.write(iteration, self.weights)
        self.writing = functools.partial(self.write, iteration, self.weights)
        return self.save_dir / f"iter_{iteration:07d}"

    def saved(self, *, wait, on_poll):
        """In the background, a checkpoint is written when it is waited for, or at the second question."""
        self.questions += 1
        if self.writing is not None and (wait or self.questions % 2 == 0):
            self.writing()
            self.writing = None
        return self.writing is None

    def write(self, iteration, weights):
        final = self.save_dir / f"iter_{iteration:07d}"
        partial = final.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.model, partial)
        self.clock.tick(f"save {iteration}")
        (partial / "weights.json").write_text(json.dumps(weights))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        self.clock.tick(f"saved {iteration}")
        return final

    def finish_loading(self) -> None:
        self.finished_at = [*self.finished_at, self.clock.names[-1]]

    def check(self) -> None:
        self.checks += 1

    def leave(self) -> None:
        self.clock.tick("leave")
