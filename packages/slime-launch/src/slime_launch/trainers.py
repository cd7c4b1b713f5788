"""The training half as the loop sees it: one Ray actor per rank, called together."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.config import AlgorithmConfig
from slime_core.hooks import HookArgs
from slime_core.interfaces import TrainerWorker, WeightChannel
from slime_core.types import Rendezvous, SleepReport, SyncReport, TrainReport, TrainShard, WeightUpdate
from slime_launch.calls import Call, Host, Watch, Worker, gather
from slime_launch.errors import RunError, TrainerLostError
from slime_launch.placement import Placement, live_nodes, own_share, runtime_env, use_cluster_interface
from slime_launch.processes import end_processes, on_nodes
from slime_launch.remote import Question, Remote, start_on_all
from slime_rollout.engine import free_port
from slime_rollout.service import ChannelSpec
from slime_rollout.supervise import private_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_convert.shape import ModelShape
    from slime_launch.overrides import Overrides
    from slime_megatron.service import MegatronConfig

CLOSE_SECONDS = 5.0
MOST_TIMELINES = 16
"""Ranks whose timelines are written down; of more ranks, so many that are evenly spread."""


class TrainerSpec(NamedTuple):
    """The settings of a rank. Its weights are those in ``resume_from``, or else of --load.

    With ``weights_first`` it loads the rest of its checkpoint once it has sent the weights.
    """

    config: MegatronConfig
    algorithm: AlgorithmConfig
    shape: ModelShape
    resume_from: str | None
    output_dir: str
    overrides: Overrides
    quantized_as: str | None = None
    take_turns: bool = False
    most_behind: int = 1
    weights_first: bool = False
    args: HookArgs | None = None
    only_evaluates: bool = False


class Seat(NamedTuple):
    """A rank's place: its CPU threads, if given; the ranks that share its node's cores; whether nodes are several."""

    threads: int | None
    neighbours: int
    on_several_nodes: bool


class TrainerRank(Host):
    """Holds this rank's :class:`~slime_core.interfaces.TrainerWorker`, once it is built.

    Calls with shards and channels go by its own methods: each rank fetches its shard, and opens its channel.
    """

    held: TrainerWorker | None = None

    def __init__(self, directory: str, log_path: str, seat: Seat) -> None:
        self._threads = own_share(seat.neighbours) if seat.threads is None and seat.neighbours else seat.threads
        super().__init__(directory, log_path, threads=self._threads)
        if seat.on_several_nodes:
            use_cluster_interface()
        self._channel: tuple[ChannelSpec, WeightChannel] | None = None
        self._rank = 0
        self._listening: socket.socket | None = None  # of rank 0, until `build`
        self._folder: Path | None = None  # of rank 0, where ranks meet

    def alive(self) -> int:
        """This process's id; that it answers is what matters."""
        return os.getpid()

    def meeting_point(self, ranks: int, nodes: int) -> Rendezvous:
        """Where so many ranks on so many nodes meet, for rank 0.

        That is a file of this user's alone on one node, and else a port where this process listens from now on: its
        imports take seconds, in which a port that was only found to be free could be taken by another run.
        """
        import ray

        address = ray.util.get_node_ip_address()
        if nodes == 1:
            if ranks > 1:
                self._folder = private_folder("slime-ranks-")
            file = None if self._folder is None else str(self._folder / "store")
            return Rendezvous(rank=0, world_size=ranks, address=address, file=file)
        family, _, _, _, where = socket.getaddrinfo(address, free_port(address), type=socket.SOCK_STREAM)[0]
        self._listening = socket.create_server(where, family=family)
        return Rendezvous(rank=0, world_size=ranks, address=address, port=self._listening.getsockname()[1])

    def build(self, spec: TrainerSpec, rendezvous: Rendezvous) -> None:
        """Build the model, meet the other ranks and load weights."""
        from slime_megatron.service import start_worker

        self._rank = rendezvous.rank
        if self._listening is not None:
            rendezvous = dataclasses.replace(rendezvous, listen=self._listening.detach())
            self._listening = None
        self.held = start_worker(
            dataclasses.replace(spec.config, trainer_threads=self._threads),
            spec.algorithm,
            spec.shape,
            rendezvous,
            resume_from=spec.resume_from,
            output_dir=spec.output_dir,
            overrides=spec.overrides,
            quantized_as=spec.quantized_as,
            take_turns=spec.take_turns,
            most_behind=spec.most_behind,
            weights_first=spec.weights_first,
            args=spec.args,
            only_evaluates=spec.only_evaluates,
        )

    def train(self, shards: Sequence[Any]) -> TrainReport:
        """Train on one rollout, given references to the shards by data-parallel rank."""
        return self._worker.train(self._fetch(shards))

    def evaluate(self, shards: Sequence[Any]) -> dict[str, float]:
        """The loss of one step's shards and its metrics, without training on them."""
        return self._worker.evaluate(self._fetch(shards))

    def push(self, update: WeightUpdate, channels: Mapping[int, ChannelSpec]) -> SyncReport:
        """Send the weights by this rank's channel, if it has one; they are by rank."""
        spec = channels.get(self._rank)
        return self._worker.push(update, None if spec is None else self._open(spec), tuple(channels))

    def inspect(self, update: WeightUpdate, channel: ChannelSpec) -> SyncReport:
        """Compare the engines' weights with those that :meth:`push` would send."""
        return self._worker.push(update, channel.inspector(), (0,))

    def close(self) -> None:
        """Give back the channel's shared memory, and leave the process groups."""
        if self._channel is not None:
            self._channel[1].close()
        if self.held is not None:
            self.held.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _worker(self) -> TrainerWorker:
        assert self.held is not None
        return self.held

    def _fetch(self, shards: Sequence[Any]) -> TrainShard:
        import ray

        shard: TrainShard = ray.get(shards[self._worker.data_parallel_rank])
        return shard

    def _open(self, spec: ChannelSpec) -> WeightChannel:
        """The channel, which is kept for the next update, because it keeps its buffer."""
        if self._channel is None or self._channel[0] != spec:
            if self._channel is not None:
                self._channel[1].close()
            self._channel = (spec, spec.open())
        return self._channel[1]


def start_ranks(
    place: Placement, threads: int | None, environment: Mapping[str, str], *, log_dir: Path, watch: Watch
) -> list[Worker]:
    """Start one actor per rank, with some variables in its environment."""
    import ray

    workers = []
    for rank, bundle in enumerate(place.trainer):
        log_path = log_dir / f"trainer-{rank}.log"
        actor = ray.remote(TrainerRank).options(
            scheduling_strategy=place.strategy(bundle),
            runtime_env=runtime_env(environment),
            **place.layout.trainer_resources(),
        )
        neighbours = 0 if place.layout.cuda else place.neighbours(bundle)
        handle = actor.remote(str(Path.cwd()), str(log_path), Seat(threads, neighbours, place.on_several_nodes))
        workers.append(Worker(f"trainer rank {rank}", handle, log_path, watch, lost=TrainerLostError))
    return workers


class TrainerGroup:
    """All ranks, in order; none in a run that only generates. Use :meth:`start`, then :meth:`build`.

    ``launch`` starts their actors, again and again.
    """

    def __init__(self, launch: Callable[[], Sequence[Worker]], config: MegatronConfig) -> None:
        self._launch = launch
        self._config = config
        self._spec: TrainerSpec | None = None
        self._has_rest = False
        self._loading: Call[None] | None = None
        self._seat(launch())

    def _seat(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._ranks = [Remote[TrainerRank](worker) for worker in workers]
        self._trainers = [Remote[TrainerWorker](worker, Host.call_held) for worker in workers]
        self._alive = Question(self._ranks, TrainerRank.alive)

    @classmethod
    def start(
        cls, place: Placement, config: MegatronConfig, *, environment: Mapping[str, str], log_dir: Path, watch: Watch
    ) -> TrainerGroup:
        """Start one actor per rank, with some variables in its environment."""
        threads = config.trainer_threads
        launch = functools.partial(start_ranks, place, threads, environment, log_dir=log_dir, watch=watch)
        return cls(launch, config)

    @property
    def data_parallel_size(self) -> int:
        """Number of shards that a rollout is split into; 1 where there are no ranks."""
        if not self._workers:
            return 1
        return self._config.data_parallel_size(len(self._workers))

    def build(self, spec: TrainerSpec) -> dict[Any, Worker]:
        """Begin to build the model on all ranks; give the result to :func:`gather`."""
        self._spec, self._loading = spec, None
        self._has_rest = spec.weights_first and spec.resume_from is not None
        if not self._workers:
            return {}
        for worker in self._workers:
            worker.introduce()
        nodes = {rank.call(TrainerRank.introduce).node for rank in self._ranks}
        meeting = self._ranks[0].call(TrainerRank.meeting_point, len(self._ranks), len(nodes))
        return {
            rank.begin(TrainerRank.build, spec, dataclasses.replace(meeting, rank=number)): rank.worker
            for number, rank in enumerate(self._ranks)
        }

    def restart(self, resume_from: Path | None, *, on_poll: Callable[[], None]) -> None:
        """End what is left of the ranks, start others in their places, and have them load a checkpoint.

        ``None`` means the weights that the run began with.

        Raises:
            TrainerLostError: A rank died again.
        """
        assert self._spec is not None
        self.kill()
        places = [place for worker in self._workers if (place := worker.place()) is not None]
        if left := [pid for pids in on_nodes(places, end_processes) for pid in pids]:
            raise RunError(f"trainer ranks do not end (processes {left}); others may not start beside them")
        self._seat(self._launch())
        spec = self._spec._replace(resume_from=str(resume_from) if resume_from is not None else None)
        gather(self.build(spec), on_poll=on_poll)

    def finish_loading(self) -> None:
        """Have the ranks load what they have left for when they are free. What goes wrong, :meth:`check` raises."""
        if self._has_rest:
            calls = {rank.begin(TrainerWorker.finish_loading): rank.worker for rank in self._trainers}
            self._has_rest, self._loading = False, Call(calls, awaited=False)

    def train(self, shards: list[Any], *, on_poll: Callable[[], None]) -> TrainReport:
        """Train on one rollout, given a reference to the shard of each data-parallel rank."""
        reports = start_on_all(self._ranks, TrainerRank.train, [*shards]).wait(on_poll)
        shown = reports[:: -(-len(reports) // MOST_TIMELINES)]
        return dataclasses.replace(reports[0], spans=[span for report in shown for span in report.spans])

    def evaluate(self, shards: list[Any], *, on_poll: Callable[[], None]) -> dict[str, float]:
        """The loss of one step's shards and its metrics, without training on them."""
        return start_on_all(self._ranks, TrainerRank.evaluate, [*shards]).wait(on_poll)[0]

    def log_probs(self, shard: TrainShard, *, on_poll: Callable[[], None]) -> list[NDArray[np.float32]]:
        """Log-probs of the policy for a small shard's samples; every data-parallel rank computes the same one."""
        return start_on_all(self._trainers, TrainerWorker.forward, shard, "actor").wait(on_poll)[0]

    def inspect(self, channel: ChannelSpec, version: int, *, on_poll: Callable[[], None]) -> list[str]:
        """Compare the engines' weights with the trainer's; gives those that are gathered otherwise than they are.

        Raises:
            WeightSyncError: An engine holds other weights than are gathered; the message names them.
        """
        mismatches = start_on_all(self._trainers, TrainerWorker.export_mismatches).wait(on_poll)[0]
        if not mismatches:
            update = WeightUpdate(version=version)
            start_on_all(self._ranks, TrainerRank.inspect, update, channel).wait(on_poll)
        return mismatches

    def push_weights(self, channel: ChannelSpec, version: int, *, on_poll: Callable[[], None]) -> SyncReport:
        """Send the weights to the engines; the report is that of the first rank.

        Raises:
            WeightSyncError: An engine cannot be reached.
        """
        nodes = [None if (place := worker.place()) is None else place.node for worker in self._workers]
        channels, update = channel.by_rank(nodes, live_nodes), WeightUpdate(version=version)
        return start_on_all(self._ranks, TrainerRank.push, update, channels).wait(on_poll)[0]

    def sleep(self, *, keep_weights: bool, on_poll: Callable[[], None]) -> SleepReport:
        """Have all ranks give memory back, with ``keep_weights`` all but weights; rank 0's report."""
        return start_on_all(self._trainers, TrainerWorker.sleep, keep_weights).wait(on_poll)[0]

    def wake(self, *, weights_only: bool, on_poll: Callable[[], None]) -> None:
        """Have all ranks take it again, with ``weights_only`` the weights' alone."""
        start_on_all(self._trainers, TrainerWorker.wake, weights_only).wait(on_poll)

    def save(self, iteration: int, *, on_poll: Callable[[], None]) -> Path:
        """Write a checkpoint; returns its directory, which is complete when :meth:`saved` says so."""
        return Path(start_on_all(self._trainers, TrainerWorker.save, iteration).wait(on_poll)[0])

    def saved(self, *, wait: bool, on_poll: Callable[[], None]) -> bool:
        """Whether every rank has written its part of the last checkpoint; with ``wait``, once it has."""
        return start_on_all(self._trainers, TrainerWorker.saved, wait).wait(on_poll)[0]

    def check(self) -> None:
        """See whether all ranks live, without waiting. Ask again and again while they have nothing to do.

        Raises:
            RunError: One is gone, with the last lines of its log.
        """
        if self._loading is not None and self._loading.done(0):
            self._loading = None
        self._alive.answers()

    def leave(self) -> None:
        """Let the ranks leave their process groups in order; give up after a few seconds."""
        import ray

        refs = [rank.begin(TrainerRank.close) for rank in self._ranks]
        if not refs:
            return
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_SECONDS)

    def kill(self) -> None:
        """End the ranks, whatever they do."""
        for worker in self._workers:
            worker.kill()
