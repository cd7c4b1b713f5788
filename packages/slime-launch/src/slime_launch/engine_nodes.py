"""Engines on several nodes: one small actor on each node starts them there, and is asked about them.

    rollout worker: fleet, monitor ──▶ NodeLauncher ──▶ EngineNode (one a node) ──▶ engines of that node
                                  └──────────────── HTTP ───────────────────────────────┘

Placement groups say where an engine belongs: that of the run, and one for each engine that ``--rollout-max-num-gpus``
adds. Where a node is gone, Ray gives its bundles to another node that has room, perhaps one that joins later; with
fault tolerance the engine is started there. Until then the run goes on with the engines that are left.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from slime_core.errors import SlimeError
from slime_launch.calls import prepare
from slime_launch.errors import PlacementError
from slime_launch.placement import (
    Placement,
    bundle_gpus,
    bundle_nodes,
    live_nodes,
    own_share,
    runtime_env,
    strategy_of,
    use_cluster_interface,
)
from slime_launch.processes import own_node
from slime_rollout.engine import (
    EngineConfig,
    EngineError,
    EngineLauncher,
    EngineSpec,
    EngineStartError,
    NoRoomError,
    Ports,
    SGLangEngine,
    address,
)

Given = ParamSpec("Given")
Result = TypeVar("Result")
End = Literal["request_stop", "stop", "kill"]
"""How an engine is ended: methods of `SGLangEngine`."""

START_SECONDS = 60.0  # for an actor to start on a node, and for an engine's process; not until that serves
LOOK_SECONDS = 1.0
END_SECONDS = 20.0
CALLS_AT_ONCE = 16
LOST = -1  # exit code of an engine whose node is gone


class EngineSeat(NamedTuple):
    """A GPU (a CPU worker without CUDA) for engines: a bundle of a placement group."""

    group: Any
    bundle: int


@dataclasses.dataclass(frozen=True)
class EngineSeats:
    """The seats that engines may have.

    Attributes:
        seats: In the order of `EngineSpec.base_gpu_id`.
        size: How many are of one engine.
        shared: Whether trainer ranks are there, too, and hand weights over on the GPU: engines see all of a node's.
    """

    seats: tuple[EngineSeat, ...]
    size: int
    cuda: bool
    shared: bool
    log_dir: str

    @classmethod
    def of(cls, place: Placement, num_engines: int, log_dir: Path, *, spare: int = 0) -> EngineSeats:
        """Those of a run, and of so many ``spare`` engines: Ray finds room for each as soon as one node has it all."""
        from ray.util.placement_group import placement_group

        size = max(1, len(place.rollout) // max(1, num_engines))
        seats = [EngineSeat(place.group, bundle) for bundle in place.rollout]
        for _ in range(spare):
            group = placement_group([dict(place.layout.bundles[0]) for _ in range(size)], strategy="STRICT_PACK")
            seats += [EngineSeat(group, bundle) for bundle in range(size)]
        layout = place.layout
        return cls(tuple(seats), size, layout.cuda, layout.shared, str(log_dir.resolve()))

    def nodes(self) -> dict[int, str]:
        """Ray's id of the node of each seat that has one, as far as Ray knows."""
        groups = {seat.group.id: seat.group for seat in self.seats}
        tables = {identity: bundle_nodes(group) for identity, group in groups.items()}
        found = {place: tables[seat.group.id].get(seat.bundle) for place, seat in enumerate(self.seats)}
        return {place: node for place, node in found.items() if node is not None}

    def gpus(self, places: Sequence[int]) -> dict[int, int]:
        """The GPU of each seat, all of one group, on its node; none without CUDA. `NoRoomError` if Ray names none."""
        if not self.cuda or not places:
            return {}
        group = self.seats[places[0]].group
        try:
            found = bundle_gpus(group, [self.seats[place].bundle for place in places])
        except PlacementError as error:
            raise NoRoomError(str(error)) from error
        return {place: found[self.seats[place].bundle] for place in places}


class Started(NamedTuple):
    """An engine that was started: its number on the node, its port, and the id of its process there."""

    number: int
    port: int
    pid: int


class Look(NamedTuple):
    """The state of an engine's process: its exit code (``None`` while it runs), in words, and its process ids."""

    code: int | None
    ending: str
    process_ids: list[int]


class EngineNode:
    """Runs inside a Ray actor: starts engines on its node, and ends them."""

    def __init__(self, directory: str, log_path: str, config: EngineConfig, neighbours: int) -> None:
        prepare(directory, log_path, threads=1)
        use_cluster_interface()
        if config.engine_threads is None and neighbours:
            config = dataclasses.replace(config, engine_threads=own_share(neighbours))
        self._ports = Ports(config.sglang_router_port)
        self._launcher = EngineLauncher(config, self._ports)
        self._engines: list[SGLangEngine] = []
        self._starting = threading.Lock()

    def introduce(self) -> str:
        """Ray's id of the node that it is on."""
        return own_node()

    def check(self, specs: Sequence[EngineSpec]) -> None:
        """As of `EngineLauncher`."""
        self._launcher.check(specs)

    def take_port(self, host: str) -> int:
        """A port that is free on this node."""
        return self._ports.take(host)

    def start(self, spec: EngineSpec, log_path: str, gpus: Sequence[int]) -> Started:
        """Start an engine, or its part on this node, on its GPUs here; errors as of `EngineLauncher`."""
        with self._starting:
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
            engine = self._launcher.start(spec, log_path=Path(log_path))
            self._engines.append(engine)
            return Started(len(self._engines) - 1, engine.spec.port, engine.pid)

    def look(self, number: int) -> Look:
        """How an engine's process is."""
        engine = self._engines[number]
        code = engine.exit_code
        return Look(code, "" if code is None else engine.ending, engine.process_ids())

    def log_tail(self, number: int, lines: int) -> str:
        """The last lines of an engine's log."""
        return self._engines[number].log_tail(lines)

    def end(self, number: int, how: End) -> None:
        """Have an engine end."""
        getattr(self._engines[number], how)()


class NodeHandle:
    """An :class:`EngineNode` from outside. One that does not answer in time is lost, with all its engines."""

    def __init__(self, identity: str, name: str, handle: Any) -> None:
        self.identity, self.name = identity, name
        self.handle = handle
        self.is_lost = False

    def ask(
        self,
        seconds: float,
        method: Callable[Concatenate[EngineNode, Given], Result],
        /,
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> Result:
        """Call a method and wait for its result, so many seconds at most.

        Raises:
            NoRoomError: The node is gone, or does not answer.
            SlimeError: As raised there.
        """
        result: Result = self.wait(self.begin(method, *args, **kwargs), seconds)
        return result

    def begin(
        self, method: Callable[Concatenate[EngineNode, Given], Any], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Any:
        """Call a method without waiting; gives a reference for :meth:`wait`."""
        return getattr(self.handle, method.__name__).remote(*args, **kwargs)

    def wait(self, reference: Any, seconds: float) -> Any:
        """The result of a call; errors as of :meth:`ask`."""
        import ray

        deadline = time.monotonic() + seconds
        while not ray.wait([reference], timeout=LOOK_SECONDS)[0]:
            if time.monotonic() > deadline or self.identity not in live_nodes():
                self.lose()
                raise NoRoomError(f"node {self.name} does not answer")
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise EngineError(f"an engine on node {self.name} cannot be handled: {error.cause}") from error
        except ray.exceptions.RayError as error:
            self.lose()
            raise NoRoomError(f"node {self.name} is gone: {error}") from error

    def lose(self) -> None:
        """Give it up: end its actor, with which its engines end, wherever it still runs."""
        import ray

        self.is_lost = True
        ray.kill(self.handle, no_restart=True)


class NodeProcess:
    """The process of an engine on its node, or its processes on several nodes. Used like `Supervised`."""

    def __init__(self, parts: Sequence[tuple[NodeHandle, Started]], log_path: Path) -> None:
        self._parts = list(parts)
        self._looks: dict[int, Any] = {}
        self._end: Look | None = None
        self._telling = 0  # the part whose log tells most: the first, or that which ended first
        self._log_path = log_path

    @property
    def pid(self) -> int:
        """Id of its supervisor, on its first node."""
        return self._parts[0][1].pid

    @property
    def log_path(self) -> Path | None:
        """Log of its first node, or of that on which it ended."""
        return part_log(self._log_path, self._telling)

    @property
    def ending(self) -> str:
        """As of `Supervised`."""
        return "it has not ended" if self._end is None else self._end.ending

    def poll(self) -> int | None:
        """As of `Supervised`; what is left of it on other nodes is ended first."""
        if self._end is None:
            looks = [self._look(place) for place in range(len(self._parts))]
            ended = [place for place, look in enumerate(looks) if look.code is not None]
            if ended:
                self._telling, self._end = ended[0], looks[ended[0]]
                self.kill()
        return None if self._end is None else self._end.code

    def process_ids(self) -> list[int]:
        """As of `Supervised`, on all its nodes."""
        return [pid for place in range(len(self._parts)) for pid in self._look(place).process_ids]

    def log_tail(self, lines: int = 20) -> str:
        """As of `Supervised`, of :attr:`log_path`."""
        node, started = self._parts[self._telling]
        if node.is_lost:
            return f"(node {node.name} is lost, and the log with it)"
        try:
            return node.ask(END_SECONDS, EngineNode.log_tail, started.number, lines)
        except EngineError as error:
            return f"({error})"

    def request_stop(self) -> None:
        """As of `Supervised`."""
        for node, started in self._parts:
            if not node.is_lost:
                node.begin(EngineNode.end, started.number, "request_stop")

    def stop(self) -> None:
        """As of `Supervised`; gives a node up that does not answer."""
        self._end_all("stop")

    def kill(self) -> None:
        """As :meth:`stop`, at once."""
        self._end_all("kill")

    def _end_all(self, how: End) -> None:
        calls = [
            (node, node.begin(EngineNode.end, started.number, how)) for node, started in self._parts if not node.is_lost
        ]
        for node, call in calls:
            try:
                node.wait(call, END_SECONDS)
            except NoRoomError:  # its engines end with it
                continue

    def _look(self, place: int) -> Look:
        """The last look at one of its parts; a new one, unless the node takes long to answer."""
        import ray

        node, started = self._parts[place]
        lost = Look(LOST, f"node {node.name} is lost", [])
        if node.is_lost:
            return lost
        call = self._looks.pop(place, None) or node.begin(EngineNode.look, started.number)
        if not ray.wait([call], timeout=LOOK_SECONDS)[0]:
            self._looks[place] = call
            return Look(None, "", [])
        try:
            look: Look = node.wait(call, LOOK_SECONDS)
        except NoRoomError:
            return lost
        return look


def part_log(log_path: Path, node_rank: int) -> Path:
    """Log of an engine's process on one of its nodes."""
    return log_path if node_rank == 0 else log_path.with_stem(f"{log_path.stem}_node_{node_rank}")


class NodeLauncher(EngineLauncher):
    """Starts engines on the nodes of some seats; each on those of the seats that are its share."""

    def __init__(self, seats: EngineSeats, config: EngineConfig) -> None:
        super().__init__(config, Ports())
        self._seats = seats
        self._nodes: dict[str, NodeHandle] = {}
        self._lock = threading.Lock()  # several models start at once

    def check(self, specs: Iterable[EngineSpec]) -> None:
        """As of `EngineLauncher`, on every node."""
        specs, places = list(specs), self._places()
        for place in dict.fromkeys(places.values()):
            self._node(place, places).ask(START_SECONDS, EngineNode.check, specs)

    def start(self, spec: EngineSpec, *, log_path: Path) -> SGLangEngine:
        """Start one engine, with a process on each node of its GPUs; returns at once.

        Raises:
            NoRoomError: A node of it is gone, and Ray has found no other yet.
            EngineStartError: Its GPUs lie unevenly on several nodes.
            SlimeError: As of `EngineLauncher`.
        """
        places = self._places()
        first = spec.base_gpu_id
        seats = range(len(self._seats.seats))[first : first + spec.ranks(self._config)]
        if missing := [seat for seat in seats if seat not in places]:
            raise NoRoomError(f"no node has room for {len(missing)} of its {len(seats)} GPUs")
        shares: dict[tuple[str, str], list[int]] = {}
        for seat in seats:
            shares.setdefault(places[seat], []).append(seat)
        if len({len(share) for share in shares.values()}) > 1:
            uneven = " + ".join(str(len(share)) for share in shares.values())
            raise EngineStartError(
                f"an engine of {len(seats)} GPUs got {uneven} on {len(shares)} nodes, and needs as many on each; "
                "give another --rollout-num-gpus-per-engine, or nodes with a multiple of it"
            )
        seen = shares
        if self._seats.shared:
            seen = {place: [seat for seat, own in places.items() if own == place] for place in shares}
        gpus = self._seats.gpus([seat for own in seen.values() for seat in own])
        nodes = [self._node(place, places) for place in shares]
        hosts = [host for _, host in shares]
        spec = dataclasses.replace(spec, host=hosts[0], base_gpu_id=0, nodes=len(nodes))
        if len(nodes) > 1:
            port = nodes[0].ask(START_SECONDS, EngineNode.take_port, hosts[0])
            spec = dataclasses.replace(spec, meeting_point=address(hosts[0], port).removeprefix("http://"))
        parts: list[tuple[NodeHandle, Started]] = []
        try:
            for rank, (node, host, place) in enumerate(zip(nodes, hosts, shares, strict=True)):
                first = seen[place].index(shares[place][0])
                own = dataclasses.replace(spec, host=host, node_rank=rank, base_gpu_id=first)
                log = part_log(log_path, rank)
                here = [gpus[seat] for seat in seen[place]] if gpus else []
                parts.append((node, node.ask(START_SECONDS, EngineNode.start, own, str(log), here)))
        except BaseException:
            NodeProcess(parts, log_path).kill()
            raise
        process = NodeProcess(parts, log_path)
        return SGLangEngine(process, dataclasses.replace(spec, port=parts[0][1].port), self._config.key)

    def _places(self) -> dict[int, tuple[str, str]]:
        """Of each seat that has a node now: Ray's id of it, and its address."""
        live = live_nodes()
        return {seat: (node, live[node]) for seat, node in self._seats.nodes().items() if node in live}

    def _node(self, place: tuple[str, str], places: dict[int, tuple[str, str]]) -> NodeHandle:
        """The actor on a node, started if it is not there yet."""
        import ray

        identity, host = place
        with self._lock:
            node = self._nodes.get(identity)
            if node is None or node.is_lost:
                seats = [seat for seat, own in places.items() if own == place]
                actor = ray.remote(EngineNode).options(
                    scheduling_strategy=strategy_of(*self._seats.seats[seats[0]]),
                    num_cpus=0,
                    max_concurrency=CALLS_AT_ONCE,
                    runtime_env=runtime_env(),
                )
                log = Path(self._seats.log_dir) / f"engines-{host.replace(':', '-')}.log"
                neighbours = 0 if self._seats.cuda else -(-len(seats) // self._seats.size)
                handle = actor.remote(str(Path.cwd()), str(log), self._config, neighbours)
                node = NodeHandle(identity, host, handle)
                if node.ask(START_SECONDS, EngineNode.introduce) != identity:  # the bundle has moved meanwhile
                    node.lose()
                    raise NoRoomError(f"node {host} is gone")
                self._nodes[identity] = node
            return node
