"""The training half as the loop sees it: one Ray actor per rank, called together."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import socket
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.config import AlgorithmConfig
from slime_core.hooks import HookArgs
from slime_core.interfaces import TrainerWorker, WeightChannel
from slime_core.types import Rendezvous, SleepReport, SyncReport, TrainReport, TrainShard, WeightUpdate
from slime_launch.calls import Call, Question, Watch, Worker, gather, prepare
from slime_launch.errors import RunError, TrainerLostError
from slime_launch.placement import Placement, live_nodes, own_share, runtime_env, use_cluster_interface
from slime_launch.processes import Place, end_processes, on_nodes, own_place
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.addresses import free_port
from slime_rollout.generation_service import ChannelSpec
from slime_rollout.supervise.private_folder import private_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_convert.shape import ModelShape
    from slime_launch.overrides import Overrides
    from slime_megatron.config import MegatronConfig

CLOSE_SECONDS = 5.0
MOST_TIMELINES = 16
"""Ranks whose timelines are written down; of more ranks, so many that are evenly spread."""


class TrainerSpec(NamedTuple):
    """What a rank needs to build the model: its own checkpoint in ``resume_from``, or else the weights of --load.

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


class Shards(NamedTuple):
    """A rollout's shards in Ray's object store, by data-parallel rank. Each rank fetches its own alone."""

    references: list[Any]


class Channels(NamedTuple):
    """Settings of the channel of each rank that sends weights."""

    by_rank: dict[int, ChannelSpec]


class Inspection(NamedTuple):
    """Settings of the channel whose engines rank 0 compares weights with."""

    channel: ChannelSpec


class Seat(NamedTuple):
    """What a rank shares: its CPU threads as given, or the ranks on its node where cores are shared; the cluster."""

    threads: int | None
    neighbours: int
    on_several_nodes: bool


class TrainerRank:
    """Runs inside a Ray actor: passes calls on to this rank's :class:`~slime_core.interfaces.TrainerWorker`."""

    def __init__(self, directory: str, log_path: str, seat: Seat) -> None:
        self._threads = own_share(seat.neighbours) if seat.threads is None and seat.neighbours else seat.threads
        prepare(directory, log_path, threads=self._threads)
        if seat.on_several_nodes:
            use_cluster_interface()
        self._worker: TrainerWorker | None = None  # until `build`
        self._channel: tuple[ChannelSpec, WeightChannel] | None = None
        self._rank = 0
        self._listening: socket.socket | None = None  # of rank 0, until `build`
        self._folder: Path | None = None  # of rank 0, where ranks meet

    def alive(self) -> int:
        """This process's id; that it answers is what matters."""
        return os.getpid()

    def introduce(self) -> Place:
        """Where this process is."""
        return own_place()

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
        from slime_megatron.start import start_worker

        self._rank = rendezvous.rank
        if self._listening is not None:
            rendezvous = dataclasses.replace(rendezvous, listen=self._listening.detach())
            self._listening = None
        self._worker = start_worker(
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

    def call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the worker. :class:`Shards` become this rank's shard, the others a channel."""
        assert self._worker is not None
        given = [self._resolve(self._worker, argument) for argument in arguments]
        return getattr(self._worker, verb)(*given)

    def close(self) -> None:
        """Give back the channel's shared memory, and leave the process groups."""
        if self._channel is not None:
            self._channel[1].close()
        if self._worker is not None:
            self._worker.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _resolve(self, worker: TrainerWorker, argument: Any) -> Any:
        if isinstance(argument, Shards):
            import ray

            return ray.get(argument.references[worker.data_parallel_rank])
        if isinstance(argument, Inspection):
            return argument.channel.inspector()
        if isinstance(argument, Channels):
            spec = argument.by_rank.get(self._rank)
            return None if spec is None else self._open(spec)
        return argument

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
        self._workers = list(launch())
        self._alive = Question(self._workers, "alive")
        self._has_rest = False
        self._loading: Call[None] | None = None

    @classmethod
    def start(
        cls,
        place: Placement,
        config: MegatronConfig,
        *,
        environment: Mapping[str, str],
        log_dir: Path,
        watch: Watch,
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
        nodes = {worker.call("introduce").node for worker in self._workers}
        meeting: Rendezvous = self._workers[0].call("meeting_point", len(self._workers), len(nodes))
        return {
            worker.start_call("build", spec, dataclasses.replace(meeting, rank=rank)): worker
            for rank, worker in enumerate(self._workers)
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
        self._workers = list(self._launch())
        self._alive = Question(self._workers, "alive")
        spec = self._spec._replace(resume_from=str(resume_from) if resume_from is not None else None)
        gather(self.build(spec), on_poll=on_poll)

    def finish_loading(self) -> None:
        """Have the ranks load what they have left for when they are free. What goes wrong, :meth:`check` raises."""
        if self._has_rest:
            calls = {worker.start_call("call", "finish_loading"): worker for worker in self._workers}
            self._has_rest, self._loading = False, Call(calls, awaited=False)

    def train(self, shards: list[Any], *, on_poll: Callable[[], None]) -> TrainReport:
        """Train on one rollout, given a reference to the shard of each data-parallel rank."""
        reports: list[TrainReport] = self._all("train", Shards([*shards]), on_poll=on_poll)
        shown = reports[:: -(-len(reports) // MOST_TIMELINES)]
        return dataclasses.replace(reports[0], spans=[span for report in shown for span in report.spans])

    def evaluate(self, shards: list[Any], *, on_poll: Callable[[], None]) -> dict[str, float]:
        """The loss of one step's shards and its metrics, without training on them."""
        metrics: dict[str, float] = self._rank_0("evaluate", Shards([*shards]), on_poll=on_poll)
        return metrics

    def log_probs(self, shard: TrainShard, *, on_poll: Callable[[], None]) -> list[NDArray[np.float32]]:
        """Log-probs of the policy for a small shard's samples; every data-parallel rank computes the same one."""
        rows: list[NDArray[np.float32]] = self._rank_0("forward", shard, on_poll=on_poll)
        return rows

    def inspect(self, channel: ChannelSpec, version: int, *, on_poll: Callable[[], None]) -> list[str]:
        """Compare the engines' weights with the trainer's; gives those that are gathered otherwise than they are.

        Raises:
            WeightSyncError: An engine holds other weights than are gathered; the message names them.
        """
        misread: list[str] = self._rank_0("misread", on_poll=on_poll)
        if not misread:
            self._rank_0("push", WeightUpdate(version=version), Inspection(channel), (0,), on_poll=on_poll)
        return misread

    def push_weights(self, channel: ChannelSpec, version: int, *, on_poll: Callable[[], None]) -> SyncReport:
        """Send the weights to the engines; the report is that of the first rank.

        Raises:
            WeightSyncError: An engine cannot be reached.
        """
        channels, update = self._channels(channel), WeightUpdate(version=version)
        report: SyncReport = self._rank_0("push", update, Channels(channels), tuple(channels), on_poll=on_poll)
        return report

    def _channels(self, channel: ChannelSpec) -> dict[int, ChannelSpec]:
        """Which ranks send where: the first to all engines; in shared memory, the first of each node to those there."""
        places = [worker.place() for worker in self._workers]
        nodes = [None if place is None else place.node for place in places]
        if channel.sync.update_weight_transport != "tensor" or len(set(nodes)) == 1:
            return {0: channel}
        live = live_nodes()
        hosts = {live.get(node or ""): nodes.index(node) for node in nodes}
        urls: dict[int, list[str]] = {}
        for url in channel.engine_urls:
            if (rank := hosts.get(urllib.parse.urlsplit(url).hostname)) is None:
                raise WeightSyncError(f"no trainer rank is on the node of {url}, and shares memory with it", url=url)
            urls.setdefault(rank, []).append(url)
        return {rank: dataclasses.replace(channel, engine_urls=tuple(own)) for rank, own in sorted(urls.items())}

    def sleep(self, *, keep_weights: bool, on_poll: Callable[[], None]) -> SleepReport:
        """Have all ranks give memory back, with ``keep_weights`` all but weights; rank 0's report."""
        report: SleepReport = self._rank_0("sleep", keep_weights, on_poll=on_poll)
        return report

    def wake(self, *, weights_only: bool, on_poll: Callable[[], None]) -> None:
        """Have all ranks take it again, with ``weights_only`` the weights' alone."""
        self._rank_0("wake", weights_only, on_poll=on_poll)

    def save(self, iteration: int, *, on_poll: Callable[[], None]) -> Path:
        """Write a checkpoint; returns its directory, which is complete when :meth:`saved` says so."""
        return Path(self._rank_0("save", iteration, on_poll=on_poll))

    def saved(self, *, wait: bool, on_poll: Callable[[], None]) -> bool:
        """Whether every rank has written its part of the last checkpoint; with ``wait``, once it has."""
        return bool(self._rank_0("saved", wait, on_poll=on_poll))

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

        refs = [worker.start_call("close") for worker in self._workers]
        if not refs:
            return
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_SECONDS)

    def kill(self) -> None:
        """End the ranks, whatever they do."""
        for worker in self._workers:
            worker.kill()

    def _rank_0(self, verb: str, *args: Any, on_poll: Callable[[], None]) -> Any:
        """Rank 0's result of a method that is called on all ranks."""
        return self._all(verb, *args, on_poll=on_poll)[0]

    def _all(self, verb: str, *args: Any, on_poll: Callable[[], None]) -> list[Any]:
        """The results of all ranks, in order."""
        pending = {worker.start_call("call", verb, *args): worker for worker in self._workers}
        return gather(pending, on_poll=on_poll)
