"""What a run writes down, made up: for tests of what compares runs."""

import dataclasses
import json

import numpy as np

from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.sums import sample_sums, shard_sum
from slime_core.types import RolloutBatch, Sample, TrainReport
from slime_launch.tracking import Tracker
from slime_rollout.ready import ReadyRollout
from slime_rollout.store import RolloutStore

SETTINGS = {"seed": 1234, "lr": 1e-6, "output_dir": "a", "hf_checkpoint": "m"}
ROLLOUTS, NAMES = 3, ["embedding.weight", "layers.0.weight", "output.weight"]


@dataclasses.dataclass
class Written:
    """What a run works with, before it is written down."""

    settings: dict = dataclasses.field(default_factory=lambda: dict(SETTINGS))
    packages: dict = dataclasses.field(default_factory=lambda: {"torch": "2.13.0"})
    engine_packages: dict = dataclasses.field(default_factory=lambda: {"sglang": "0.5.23"})
    environment: dict = dataclasses.field(default_factory=dict)
    samples: list = dataclasses.field(default_factory=lambda: [samples(number) for number in range(ROLLOUTS)])
    losses: list = dataclasses.field(default_factory=lambda: [0.5] * ROLLOUTS)
    weights: np.ndarray = dataclasses.field(
        default_factory=lambda: np.arange(ROLLOUTS * len(NAMES) * 3, dtype=np.uint32).reshape(ROLLOUTS, len(NAMES), 3)
    )
    names: list = dataclasses.field(default_factory=lambda: list(NAMES))
    swapped: int | None = None

    def write(self, directory, *, keeps=True):
        directory.mkdir()
        save = str(directory / "save")
        entries = {name: {"value": value} for name, value in (self.settings | {"save": save}).items()}
        found = {"settings": entries, "environment": self.environment, "packages": self.packages}
        (directory / "settings.json").write_text(json.dumps(found | {"engine_packages": self.engine_packages}))
        tracker = Tracker(directory, tensorboard=False)
        for number, rows in enumerate(self.samples):
            columns = RolloutBatch(rollout_id=number, groups=[rows]).columns()
            if keeps:
                RolloutStore(directory / "save" / "rollouts").write(columns)
            shards = build_shards(
                columns,
                ShardSpec(
                    algorithm=AlgorithmConfig(),
                    temperature=1.0,
                    data_parallel_size=2,
                    micro_batch_size=1,
                    global_batch_size=len(rows),
                ),
            )
            if self.swapped == number:
                shards.reverse()
            ready = ReadyRollout(
                rollout_id=number, weight_version=None, metrics={}, seconds={}, num_samples=len(rows), failures=[],
                examples=[], shards=[], shard_sums=[shard_sum(one) for one in shards],
                sample_sums=sample_sums(columns.samples) | {"index": np.asarray(columns.samples["index"])},
            )  # fmt: skip
            tracker.log("train", step=number, rollout_id=number, metrics={"train/loss": self.losses[number]})
            report = TrainReport(rollout_id=number, steps=[], weight_names=self.names, weight_sums=self.weights[number])
            tracker.log_sums(ready, report)
        tracker.close()
        return str(directory)


def samples(number):
    return [
        Sample(
            index=4 * number + member, group_index=number, prompt=f"prompt {number}", tokens=[1, 2, 10 + member, 20],
            response_length=2, rollout_log_probs=[-0.5, -1.0], reward=float(member % 2), status="completed",
        )
        for member in range(4)
    ]  # fmt: skip
