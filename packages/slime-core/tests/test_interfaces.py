import asyncio
import inspect
import typing

import numpy as np
import numpy.typing as npt
import pytest
import torch

import slime_core.interfaces
from slime_core.errors import DataError
from slime_core.interfaces import (
    Batches,
    DataSource,
    Engines,
    GroupReward,
    Reward,
    TrainerWorker,
    WeightChannel,
)
from slime_core.types import (
    Account,
    Drop,
    Keep,
    Progress,
    RolloutBatch,
    Sample,
    SleepReport,
    Status,
    SyncReport,
    TrainReport,
    Verdict,
    WeightUpdate,
)

PROTOCOLS = [
    value
    for value in vars(slime_core.interfaces).values()
    if isinstance(value, type) and getattr(value, "_is_protocol", False) and value.__module__ == "slime_core.interfaces"
]


class Source:
    """Two samples per group, numbered; groups given back come first."""

    def __init__(self):
        self.next, self.back = 0, []

    def get_samples(self, num_groups):
        return [self.back.pop(0) if self.back else self.fresh() for _ in range(num_groups)]

    def fresh(self):
        group = [
            Sample(index=2 * self.next + i, group_index=self.next, prompt="p", tokens=[1], label=str(self.next))
            for i in range(2)
        ]
        self.next += 1
        return group

    def add_samples(self, groups):
        self.back.extend(groups)

    def state_dict(self):
        return {"next": self.next, "back": [[sample.to_dict() for sample in group] for group in self.back]}

    def load_state_dict(self, state):
        self.next = state["next"]
        self.back = [[Sample.from_dict(values) for values in group] for group in state["back"]]


async def two_turns(sample):
    """Several training samples from one interaction."""
    sample.append_response([sample.index], text=str(sample.index))
    sample.status, sample.trajectory_id = Status.COMPLETED, sample.index
    second = Sample.from_dict(sample.to_dict() | {"index": sample.index + 100})
    return [sample, second]


async def even(sample):
    return float(sample.trajectory % 2 == 0)


def all_of_group(group):
    return Drop("odd_group") if group[0].group_index % 2 else Keep()


class PlainRollout:
    """A rollout that knows nothing but the interfaces."""

    def __init__(self, source: DataSource, generate, reward: Reward, keep):
        self.source, self.make, self.reward, self.keep = source, generate, reward, keep

    async def group(self, group):
        made = [part for sample in group for part in await self.make(sample)]
        for sample in made:
            sample.reward = await self.reward(sample)
        return made

    def generate(self, rollout_id):
        groups, dropped = [], {}
        while len(groups) < 2:
            (fresh,) = self.source.get_samples(1)
            group = asyncio.run(self.group(fresh))
            match self.keep(group):
                case Keep():
                    groups.append(group)
                case Drop(reason):
                    name = f"dynamic_filter/drop_{reason}"
                    dropped[name] = dropped.get(name, 0) + 1
        return RolloutBatch(rollout_id=rollout_id, groups=groups, metrics=dropped)

    def start(self):
        return None

    def account(self):
        return Account({}, None)

    def cancel(self):
        pass

    def progress(self):
        return Progress()

    def close(self):
        pass

    def state_dict(self):
        return self.source.state_dict()

    def load_state_dict(self, state):
        self.source.load_state_dict(state)


class Channel:
    def begin(self, update):
        self.names = []

    def send(self, bucket):
        self.names += [name for name, _ in bucket]
        return len(bucket)

    def end(self):
        return dict.fromkeys(self.names, "checksum")

    def close(self):
        self.names = []


class Worker:
    data_parallel_rank = 0

    def train(self, shard):
        return TrainReport(rollout_id=shard.rollout_id, steps=[])

    def forward(self, shard, role):
        return []

    def evaluate(self, shard):
        return {}

    def push(self, update, channel):
        channel.begin(update)
        sent = channel.send([("w", None)])
        return SyncReport(version=update.version, tensors=len(channel.end()), bytes=sent, seconds=0.0)

    def export_mismatches(self):
        return []

    def finish_loading(self):
        pass

    def save(self, iteration):
        return str(iteration)

    def saved(self, wait=False):
        return True

    def load(self, directory):
        return 0

    def sleep(self, keep_weights=False):
        return SleepReport(device=0, waiting=0, resident=0)

    def wake(self, weights_only=False):
        pass

    def close(self):
        pass


def test_a_rollout_needs_nothing_but_the_interfaces():
    rollout = PlainRollout(Source(), two_turns, even, all_of_group)
    assert isinstance(rollout, Batches) and not isinstance(rollout, Engines) and isinstance(rollout.source, DataSource)
    batch = rollout.generate(0)
    assert [[sample.index for sample in group] for group in batch.groups] == [[0, 100, 1, 101], [4, 104, 5, 105]]
    assert [sample.reward for sample in batch.groups[0]] == [1.0, 1.0, 0.0, 0.0]
    assert batch.metrics == {"dynamic_filter/drop_odd_group": 1.0}
    again = PlainRollout(Source(), two_turns, even, all_of_group)
    again.load_state_dict(rollout.state_dict())
    assert repr(again.generate(1)) == repr(rollout.generate(1))


def test_a_worker_needs_nothing_but_the_interfaces():
    assert isinstance(Worker(), TrainerWorker) and isinstance(Channel(), WeightChannel)
    assert Worker().push(WeightUpdate(version=3), Channel()).tensors == 1


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_every_method_is_typed_and_says_what_it_does(protocol):
    assert protocol.__doc__
    methods = {
        name: getattr(value, "fget", value)
        for name, value in vars(protocol).items()
        if name == "__call__" or (not name.startswith("_") and (callable(value) or isinstance(value, property)))
    }
    assert methods
    for name, method in methods.items():
        names = {**vars(slime_core.interfaces), "torch": torch, "np": np, "NDArray": npt.NDArray}
        hints = typing.get_type_hints(method, names)
        arguments = set(inspect.signature(method).parameters) - {"self"}
        assert hints.keys() == arguments | {"return"}, name
        assert method.__doc__, name


def test_the_interfaces_are_all_there():
    named = {Batches, DataSource, Engines, GroupReward, Reward, TrainerWorker}
    assert set(PROTOCOLS) == named | {WeightChannel}


def test_the_former_interfaces_are_parts_of_the_new_ones():
    class Both(Batches, Engines):
        """All methods of both."""

    with pytest.warns(DeprecationWarning, match="former_interfaces.Rollout"):
        former = slime_core.interfaces.Rollout
    assert isinstance(Both.__new__(Both), former)


def test_verdicts():
    assert Keep() == Keep() and Drop("a") != Drop("b") and isinstance(Drop("a"), Verdict)
    for reason in ("", None, 3):
        with pytest.raises(DataError, match="the reason to drop a group must be a name to count it by, got"):
            Drop(reason)
