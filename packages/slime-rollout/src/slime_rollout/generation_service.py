"""`GenerationService`: the generation half as one object, from the engines' processes to scored rollouts."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.errors import SlimeError
from slime_core.interfaces import WeightChannel
from slime_core.memory import Held, MemoryState
from slime_core.types import EvalReport, RolloutBatch

if TYPE_CHECKING:  # slow to import, and whoever only reads a channel's settings does not need it
    from slime_rollout.canary import CanaryTokens, EngineCanary
    from slime_rollout.config import RolloutConfig
    from slime_rollout.data import Account
    from slime_rollout.engine.config import EngineConfig, WeightSyncConfig
    from slime_rollout.engine.fleet import Fleet
    from slime_rollout.engine.server import EngineLauncher
    from slime_rollout.engine.sleep import EngineMemory
    from slime_rollout.engine.topology_plan import Topology
    from slime_rollout.rollout import RolloutManager
    from slime_rollout.weights import DeltaReceiver

TURNS_FILE = "turns.jsonl"
"""Name of :class:`~slime_rollout.generate.TurnLog`'s file in ``--save``."""
NOT_STARTED = "the engines are not started; call start() first"


class Progress(NamedTuple):
    """How far the service is: samples scored, of how many, or a note; and whether engines need the current weights.

    ``silent`` are servers that were asked something and answer nothing.
    """

    done: int | None = None
    total: int | None = None
    note: str = ""
    behind: bool = False
    silent: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """Settings of the generation half.

    ``num_spare`` more engines are started as nodes with room for them join. ``topology`` holds the contents of
    ``--sglang-config``, and ``flags`` every flag of the run, for hooks. ``dtype`` is
    ``float32`` or ``bfloat16``. ``context_length`` is the longest prompt plus response in tokens; ``None`` leaves it to
    the model's config. With ``colocate``, trainer and engines share their GPUs. With ``engines_sleep`` the service may
    be told to :meth:`~GenerationService.sleep`. Without ``weights_follow``, engines keep the weights that they were
    started with. ``turn_log`` is the file of :class:`~slime_rollout.generate.TurnLog`, if there is one.
    """

    engine: EngineConfig
    rollout: RolloutConfig
    num_engines: int
    num_gpus: int
    num_spare: int = 0
    topology: Topology | None
    dtype: str
    context_length: int | None
    seed: int
    log_dir: str
    flags: Mapping[str, Any]
    colocate: bool = False
    engines_sleep: bool = False
    weights_follow: bool = True
    turn_log: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """What a weight channel is made of. Unlike the channel itself, it needs no torch.

    ``tp_size`` is that of each engine, and ``hf_checkpoint`` what the engines were started with. ``receivers`` are what
    applies deltas on the engines' machines. With ``colocate``, trainer and engines share their GPUs.
    """

    sync: WeightSyncConfig
    engine_urls: tuple[str, ...]
    tp_size: int
    hf_checkpoint: str
    receivers: tuple[str, ...]
    colocate: bool
    key: str | None = dataclasses.field(default=None, repr=False)

    def inspector(self) -> WeightChannel:
        """What compares the engines' weights with those that it is given, and sends nothing."""
        from slime_rollout.weights.inspector import WeightInspector

        return WeightInspector(self.engine_urls, self.tp_size, self.sync.update_weight_timeout, self.key)

    def open(self) -> WeightChannel:
        """The sending end."""
        from slime_rollout.weights import open_channel

        return open_channel(
            self.sync,
            engine_urls=self.engine_urls,
            tp_size=self.tp_size,
            hf_checkpoint=self.hf_checkpoint,
            receivers=self.receivers,
            colocate=self.colocate,
            key=self.key,
        )


class CacheNamespace:
    """SGLang's ``extra_key`` of a request: keeps it off the keys and values that earlier weights computed.

    With the pause mode ``in_place`` an engine keeps its cache of prefixes over an update while requests are running. So
    each update begins a new namespace, twice: before weights are sent and after, since what is sent meanwhile may run
    on either weights. Only a request that is sent between an engine's going on and the second change, and shares a
    prefix with one that was sent after the first, can still meet the old weights' keys and values. With ``retract``
    engines clear the cache themselves, and no request names a namespace.
    """

    def __init__(self, pause_mode: str) -> None:
        self._name = uuid.uuid4().hex if pause_mode == "in_place" else None  # engines may have served another run
        self._changes = 0

    def change(self) -> None:
        """Begin a new one. Called by one thread while others ask."""
        self._changes += 1

    def __call__(self) -> str | None:
        """The namespace of a request that is sent now."""
        return None if self._name is None else f"{self._name}-{self._changes}"


class GenerationService:
    """Engines, router, data, rewards and weight versions. Implements `slime_core.interfaces.Rollout`.

    :meth:`progress` and :meth:`cancel` may be called from another thread at any time; all others one after the other.
    """

    def __init__(
        self, spec: GenerationSpec, make_launcher: Callable[[EngineConfig], EngineLauncher] | None = None
    ) -> None:
        """Nothing is started yet. ``make_launcher`` gives what starts the engines; on this host if it is ``None``."""
        self._spec = spec = dataclasses.replace(spec, engine=spec.engine.with_key())
        self._launcher = None if make_launcher is None else make_launcher(spec.engine)
        self._namespace = CacheNamespace(spec.engine.update_weight_pause_mode)
        self._engines: Fleet | None = None
        self._manager: RolloutManager | None = None
        self._receiver: DeltaReceiver | None = None
        self._canary: EngineCanary | None = None
        self._version = 0
        self._is_up = False
        self._memory = MemoryState("the generation half")
        self._engine_memory: EngineMemory | None = None
        self._progress = Progress()

    def start(self) -> None:
        """Start router and engines, wait until they serve, and read the prompts meanwhile.

        Raises:
            SlimeError: A hook, the teacher, an engine or a prompt file cannot be used.
        """
        from slime_rollout.engine.addresses import require_this_machine, router_args
        from slime_rollout.engine.server import EngineSpec
        from slime_rollout.engine.start import start_engines
        from slime_rollout.generate import TurnLog
        from slime_rollout.hooks import check_hooks, hook_args_of
        from slime_rollout.rollout import RolloutData, RolloutManager
        from slime_rollout.teacher import make_teacher

        spec = self._spec
        args = hook_args_of(spec.rollout, spec.flags)
        check_hooks(spec.rollout, args)  # errors of hooks and the teacher come before engines start
        teacher = make_teacher(spec.rollout)
        reader = ThreadPoolExecutor(max_workers=1)
        data = reader.submit(RolloutData.load, spec.rollout, args)
        reader.shutdown(wait=False)  # the error of an engine does not wait for the prompts
        self._engines = engines = start_engines(
            spec.engine,
            EngineSpec(
                model_path=spec.rollout.data.hf_checkpoint,
                dtype=spec.dtype,
                context_length=spec.context_length,
                seed=spec.seed,
                memory_saver=spec.engines_sleep,
                seeded=not spec.rollout.sampling.rollout_min_p,
                returns_experts=spec.rollout.sampling.use_rollout_routing_replay,
            ),
            num_engines=spec.num_engines,
            log_dir=Path(spec.log_dir),
            num_gpus=spec.num_gpus,
            num_spare=spec.num_spare,
            topology=spec.topology,
            longest_sample=longest_sample(spec.rollout),
            weights_follow=spec.weights_follow,
            on_progress=self._count_processes,
            launcher=self._launcher,
        )
        local = spec.engine.update_weight_mode == "delta" and not spec.engine.update_weight_receivers
        # Whoever starts engines elsewhere sends to them from there.
        if (spec.engine.update_weight_transport == "tensor" and self._launcher is None) or local:
            require_this_machine(engines.engine_urls)
        self._receivers(engines.engine_urls)  # checks that each engine has one
        self._is_up = True
        self._receiver = start_receiver(spec)
        self._progress = Progress(note="reading prompts")
        self._manager = RolloutManager(
            spec.rollout,
            router_url=engines.router_url,
            run_seed=spec.seed,
            data=data.result(),
            hook_args=args | router_args(engines.router_url, engines.model_urls),
            on_progress=self._count_samples,
            teacher=teacher,
            retry_delays=retry_delays(spec.engine),
            cache_namespace=self._namespace,
            key=spec.engine.key,
            turns=None if spec.turn_log is None else TurnLog(Path(spec.turn_log)),
        )
        self._progress = Progress(note="engines and router are up; the trainers are loading")

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score one rollout, to be trained from the version that was confirmed last.

        With ``--update-weights-interval`` the trainer may be further: after as many rollouts as have been trained on.
        """
        self._memory.require("generate", Held.EVERYTHING)
        late = self._spec.rollout.selection.update_weights_interval > 1
        with self._blame_engines():
            return self._built.generate(rollout_id, weight_version=rollout_id if late else self._version)

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score the held-out prompts."""
        self._memory.require("evaluate", Held.EVERYTHING)
        with self._blame_engines():
            return self._built.evaluate(rollout_id)

    def account(self) -> Account:
        """What became of all samples so far."""
        return self._built.account()

    def cancel(self) -> None:
        """End a :meth:`generate` or :meth:`evaluate` that is under way, which raises `CancelledError`."""
        if self._manager is not None:
            self._manager.cancel()

    def state_dict(self) -> dict[str, Any]:
        """State of the data source."""
        return self._built.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the data source where ``state`` was saved."""
        self._built.load_state_dict(state)

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        """Where to send weights: to all engines, or only to those that lack the current ones.

        Raises:
            EngineDiedError: An engine is gone that nobody replaces.
            MemoryStateError: The engines sleep, and have no memory for weights.
        """
        self._memory.require("begin_update", Held.WEIGHTS)
        engine_urls = tuple(self._started.begin_update(only_behind=only_behind))
        if engine_urls:
            self._namespace.change()
            # Engines that are behind have no requests.
            computes_again = self._spec.engine.update_weight_pause_mode == "retract" and not only_behind
            if computes_again and self._manager is not None:
                self._manager.hold()
        return ChannelSpec(
            sync=self._spec.engine,
            engine_urls=engine_urls,
            tp_size=self._started.tp_size,
            hf_checkpoint=self._spec.rollout.data.hf_checkpoint,
            receivers=self._receivers(engine_urls),
            colocate=self._spec.colocate,
            key=self._spec.engine.key,
        )

    def confirm_update(self, version: int) -> None:
        """Record that all engines of the last :meth:`begin_update` have this version."""
        self._started.confirm_update(version)
        self._namespace.change()
        self._version = version
        self._release()

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Record that sending failed; returns whether the cause is an engine that is being replaced."""
        self._release()
        return self._started.fail_update(silent)

    def _release(self) -> None:
        if self._manager is not None:
            self._manager.release()

    def score(self, urls: Sequence[str], tokens: CanaryTokens) -> dict[str, list[float]]:
        """What engines make of fixed tokens, by engine: see :class:`slime_rollout.canary.EngineCanary`."""
        from slime_rollout.canary import EngineCanary

        self._memory.require("score", Held.EVERYTHING)
        if self._canary is None:
            self._canary = EngineCanary(key=self._spec.engine.key, timeout=self._spec.engine.update_request_timeout)
        return self._canary(urls, tokens)

    def sleep(self, keep_weights: bool = False) -> None:
        """Stop generating, and have the engines give back their device memory, with ``keep_weights`` all but weights.

        With fault tolerance, engines that are being replaced are waited for, none is started from here on until
        :meth:`wake`, and one that fails to give its memory back is replaced then.

        Raises:
            MemoryStateError: There is nothing to give back.
            EngineError: An engine fails, or is busy for half a minute.
        """
        with self._memory.sleeping(keep_weights):
            self._built.close()
            self._started.begin_sleep()
            down_to = Held.WEIGHTS if keep_weights else Held.NOTHING
            if failed := self._hand_over().release(self._started.engine_urls, down_to):
                self._started.replace(failed)

    def wake(self, weights_only: bool = False) -> None:
        """Have the engines take their memory again, with ``weights_only`` the weights' alone, to be sent new ones.

        Weights that were given back are undefined until the next update. Errors as of :meth:`sleep`.
        """
        with self._memory.waking(weights_only):
            up_to = Held.WEIGHTS if weights_only else Held.EVERYTHING
            if failed := self._hand_over().resume(self._started.engine_urls, up_to):
                self._started.replace(failed)
            self._started.end_sleep(awake=not weights_only)

    def _hand_over(self) -> EngineMemory:
        from slime_rollout.engine.sleep import EngineMemory

        self._engine_memory = self._engine_memory or EngineMemory(self._spec.engine.key)
        return self._engine_memory

    def progress(self) -> Progress:
        """The last thing that happened; raises if an engine or the router is gone that nobody replaces."""
        from slime_rollout.http import ASKED

        if not self._is_up:
            return self._progress
        self._started.check()
        lost = self._started.not_serving()
        note = f"replacing {', '.join(lost)}" if lost else self._progress.note
        return self._progress._replace(note=note, behind=self._needs_weights(), silent=tuple(ASKED.silent()))

    def _needs_weights(self) -> bool:
        """Whether engines need the current weights: where memory is handed over, only if a rollout waits for that."""
        behind = bool(self._started.engines_behind())
        return behind and not (self._spec.engines_sleep and self._started.serves())

    def close(self) -> None:
        """Stop asynchronous generation, then engines and router."""
        self._is_up = False
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others
            for part in (self._engines, self._receiver):
                if part is not None:
                    stack.callback(part.stop)
            if self._manager is not None:
                stack.callback(self._manager.close)

    @property
    def _started(self) -> Fleet:
        if self._engines is None:
            raise SlimeError(NOT_STARTED)
        return self._engines

    @property
    def _built(self) -> RolloutManager:
        if self._manager is None:
            raise SlimeError(NOT_STARTED)
        return self._manager

    def _receivers(self, engine_urls: Sequence[str]) -> tuple[str, ...]:
        """What applies deltas next to each engine."""
        from slime_rollout.engine.addresses import receivers_beside

        if self._receiver is not None:
            return (str(self._receiver.url),)
        given = self._spec.engine.update_weight_receivers
        return receivers_beside(engine_urls, given) if given else ()

    @contextlib.contextmanager
    def _blame_engines(self) -> Iterator[None]:
        """Where a request fails because an engine or the router is gone, raise that, with the end of its log."""
        self._progress = Progress()
        try:
            yield
        except SlimeError:
            self._started.check()
            raise

    def _count_processes(self, ready: int, total: int, seconds: float) -> None:
        self._progress = Progress(note=f"engines and router ready: {ready} of {total}")

    def _count_samples(self, done: int, total: int) -> None:
        self._progress = Progress(done, total)


def retry_delays(engine: EngineConfig) -> tuple[float, ...]:
    """Seconds before each retry of a request: with fault tolerance, until an engine has failed for good."""
    from slime_rollout.http import RETRY_DELAYS, patient_delays

    if not engine.use_fault_tolerance:
        return RETRY_DELAYS
    noticed = engine.rollout_health_check_interval + engine.rollout_health_check_timeout
    return patient_delays((noticed + engine.engine_startup_timeout) * (engine.rollout_max_restarts + 1))


def longest_sample(config: RolloutConfig) -> int:
    """Tokens of the longest prompt and response that the run may ask for, as far as flags say."""
    response = max(config.sampling.rollout_max_response_len, config.evaluation.eval_max_response_len or 0)
    return (config.data.rollout_max_prompt_len or 1) + response


def start_receiver(spec: GenerationSpec) -> DeltaReceiver | None:
    """Applies deltas on the engines' machine; ``None`` in a run that sends none, or whose receivers are elsewhere."""
    if spec.engine.update_weight_mode != "delta" or spec.engine.update_weight_receivers:
        return None
    from slime_rollout.weights import DeltaReceiver

    return DeltaReceiver(
        directory=str(spec.engine.update_weight_local_checkpoint_dir),
        hf_checkpoint=spec.rollout.data.hf_checkpoint,
        source=str(spec.engine.update_weight_disk_dir),
        key=spec.engine.key or "",
    )
