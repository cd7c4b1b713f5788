"""`ServingEngines`: engines and router of a run as one object: their memory, and the version of their weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.errors import SlimeError
from slime_core.memory import Held, MemoryState
from slime_core.types import EvalReport, Progress

if TYPE_CHECKING:  # slow to import, and whoever only makes settings does not need it
    from slime_rollout.canary import CanaryTokens, EngineCanary
    from slime_rollout.config import RolloutConfig
    from slime_rollout.engine.channels import ChannelSpec
    from slime_rollout.engine.config import EngineConfig
    from slime_rollout.engine.fleet import Fleet
    from slime_rollout.engine.server import EngineLauncher
    from slime_rollout.engine.sleep import EngineMemory
    from slime_rollout.engine.topology_plan import Topology
    from slime_rollout.rollout import RolloutManager
    from slime_rollout.weights import DeltaReceiver

NOT_STARTED = "the engines are not started; call start() first"
Part = TypeVar("Part")


def started(part: Part | None) -> Part:
    """A part that `start` makes; a `SlimeError` before that."""
    if part is None:
        raise SlimeError(NOT_STARTED)
    return part


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """Settings of the generation half.

    ``num_spare`` more engines are started as nodes with room for them join. ``topology`` holds the contents of
    ``--sglang-config``, and ``flags`` every flag of the run, for hooks. ``dtype`` is
    ``float32`` or ``bfloat16``. ``context_length`` is the longest prompt plus response in tokens; ``None`` leaves it to
    the model's config. With ``colocate``, trainer and engines share their GPUs. With ``engines_sleep`` the service may
    be told to :meth:`~ServingEngines.sleep`. Without ``weights_follow``, engines keep the weights that they were
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
    flags: Mapping[str, Any] = dataclasses.field(repr=False)  # a key is among them
    colocate: bool = False
    engines_sleep: bool = False
    weights_follow: bool = True
    turn_log: str | None = None


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


class ServingEngines:
    """The engines of a run: `slime_core.interfaces.Engines`.

    :meth:`progress` may be called from another thread at any time; all others one after the other.

    Attributes:
        spec: Settings of the run's generation half, with the key that engines ask for.
        generator: Sends them requests, once they serve; it is held while weights change, and stopped before they sleep.
        memory: Their memory's state, and so which calls may come.
        namespace: Changes with each update of weights.
        version: That of the weights that all of them have confirmed.
        said: The last thing that happened.
    """

    def __init__(
        self, spec: GenerationSpec, make_launcher: Callable[[EngineConfig], EngineLauncher] | None = None
    ) -> None:
        """Nothing is started yet. ``make_launcher`` gives what starts the engines; on this host if it is ``None``."""
        self.spec = spec = dataclasses.replace(spec, engine=spec.engine.with_key())
        self.generator: RolloutManager | None = None
        self.memory = MemoryState("the generation half")
        self.namespace = CacheNamespace(spec.engine.update_weight_pause_mode)
        self.version = 0
        self.said = Progress()
        self._launcher = None if make_launcher is None else make_launcher(spec.engine)
        self._fleet: Fleet | None = None
        self._receiver: DeltaReceiver | None = None
        self._is_up = False

    @property
    def fleet(self) -> Fleet:
        """Engines and router. Raises SlimeError before :meth:`start`."""
        return started(self._fleet)

    def start(self) -> None:
        """Start router and engines until they serve; a `SlimeError` if one does not, or no weights could reach it."""
        from slime_rollout.engine.channels import require_this_machine
        from slime_rollout.engine.server import EngineSpec
        from slime_rollout.engine.start import start_engines

        spec = self.spec
        self._fleet = start_engines(
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
        row = spec.engine.transport
        # Whoever starts engines elsewhere sends to them from there.
        within = row is not None and row.within_machine and self._launcher is None
        if within or spec.engine.receives_here:
            require_this_machine(self._fleet.engine_urls)
        self._receivers(self._fleet.engine_urls)  # checks that each engine has one
        self._is_up = True
        self._receiver = start_receiver(spec)

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        """Where to send weights: to all engines, or only to those that lack the current ones.

        An `EngineDiedError` if an engine is gone for good, a `MemoryStateError` while they sleep.
        """
        from slime_rollout.engine.channels import ChannelSpec

        self.memory.require("begin_update", Held.WEIGHTS)
        engine_urls = tuple(self.fleet.begin_update(only_behind=only_behind))
        if engine_urls:
            self.namespace.change()
            # Engines that are behind have no requests.
            computes_again = self.spec.engine.update_weight_pause_mode == "retract" and not only_behind
            if computes_again and self.generator is not None:
                self.generator.hold()
        return ChannelSpec(
            engine_urls,
            sync=self.spec.engine,
            tp_size=self.fleet.tp_size,
            hf_checkpoint=self.spec.rollout.data.hf_checkpoint,
            receivers=self._receivers(engine_urls),
            colocate=self.spec.colocate,
            key=self.spec.engine.key,
        )

    def confirm_update(self, version: int) -> None:
        """Record that all engines of the last :meth:`begin_update` have this version."""
        self.fleet.confirm_update(version)
        self.namespace.change()
        self.version = version
        self._release()

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Record that sending failed; returns whether the cause is an engine that is being replaced."""
        self._release()
        return self.fleet.fail_update(silent)

    def _release(self) -> None:
        if self.generator is not None:
            self.generator.release()

    def canary_log_probs(self, urls: Sequence[str], tokens: CanaryTokens) -> dict[str, list[float]]:
        """Log-probs (nats) of fixed tokens, by engine: see :class:`slime_rollout.canary.EngineCanary`."""
        self.memory.require("canary_log_probs", Held.EVERYTHING)
        return self._canary(urls, tokens)

    @functools.cached_property
    def _canary(self) -> EngineCanary:
        from slime_rollout.canary import EngineCanary

        return EngineCanary(key=self.spec.engine.key, timeout=self.spec.engine.update_request_timeout)

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score the held-out prompts."""
        self.memory.require("evaluate", Held.EVERYTHING)
        generator, self.said = started(self.generator), Progress()
        try:
            return generator.evaluate(rollout_id)
        except SlimeError:
            self.fleet.check()
            raise

    def sleep(self, keep_weights: bool = False) -> None:
        """Stop generating, and have the engines give back their device memory, with ``keep_weights`` all but weights.

        With fault tolerance, engines that are being replaced are waited for, none is started from here on until
        :meth:`wake`, and one that fails to give its memory back is replaced then.

        Raises:
            MemoryStateError: There is nothing to give back.
            EngineError: An engine fails, or is busy for half a minute.
        """
        with self.memory.sleeping(keep_weights):
            if self.generator is not None:
                self.generator.close()
            self.fleet.begin_sleep()
            down_to = Held.WEIGHTS if keep_weights else Held.NOTHING
            if failed := self._sleeper.release(self.fleet.engine_urls, down_to):
                self.fleet.replace(failed)

    def wake(self, weights_only: bool = False) -> None:
        """Have the engines take their memory again, with ``weights_only`` the weights' alone, to be sent new ones.

        Weights that were given back are undefined until the next update. Errors as of :meth:`sleep`.
        """
        with self.memory.waking(weights_only):
            up_to = Held.WEIGHTS if weights_only else Held.EVERYTHING
            if failed := self._sleeper.resume(self.fleet.engine_urls, up_to):
                self.fleet.replace(failed)
            self.fleet.end_sleep(awake=not weights_only)

    @functools.cached_property
    def _sleeper(self) -> EngineMemory:
        from slime_rollout.engine.sleep import EngineMemory

        return EngineMemory(self.spec.engine.key)

    def progress(self) -> Progress:
        """The last thing that happened; raises if an engine or the router is gone that nobody replaces."""
        from slime_rollout.http import ASKED

        if not self._is_up:
            return self.said
        self.fleet.check()
        lost = self.fleet.not_serving()
        note = f"replacing {', '.join(lost)}" if lost else self.said.note
        # Where memory is handed over, engines need the current weights only if a rollout waits for that.
        can_wait = self.spec.engines_sleep and self.fleet.serves()
        behind = bool(self.fleet.engines_behind()) and not can_wait
        return self.said._replace(note=note, behind=behind, silent=tuple(ASKED.silent()))

    def stop(self) -> None:
        """Stop asynchronous generation, then engines and router."""
        self._is_up = False
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others
            for part in (self._fleet, self._receiver):
                if part is not None:
                    stack.callback(part.stop)
            if self.generator is not None:
                stack.callback(self.generator.close)

    def _receivers(self, engine_urls: Sequence[str]) -> tuple[str, ...]:
        """Receivers of updates next to each engine, if engines do not apply them themselves."""
        from slime_rollout.engine.addresses import receivers_beside

        if self._receiver is not None:
            return (str(self._receiver.url),)
        given = self.spec.engine.update_weight_receivers
        return receivers_beside(engine_urls, given) if given else ()

    def _count_processes(self, ready: int, total: int, seconds: float) -> None:
        self.said = Progress(note=f"engines and router ready: {ready} of {total}")


def longest_sample(config: RolloutConfig) -> int:
    """Tokens of the longest prompt and response that the run may ask for, as far as flags say."""
    response = max(config.sampling.rollout_max_response_len, config.evaluation.eval_max_response_len or 0)
    return (config.data.rollout_max_prompt_len or 1) + response


def start_receiver(spec: GenerationSpec) -> DeltaReceiver | None:
    """Applies updates on the engines' machine; ``None`` where engines do so themselves, or a receiver is elsewhere."""
    row = spec.engine.transport
    if row is None or row.receiver is None or not spec.engine.receives_here:
        return None
    receiver: DeltaReceiver = resolve_name(row.receiver)(
        directory=str(spec.engine.update_weight_local_checkpoint_dir),
        hf_checkpoint=spec.rollout.data.hf_checkpoint,
        source=str(spec.engine.update_weight_disk_dir),
        key=spec.engine.key or "",
    )
    return receiver
