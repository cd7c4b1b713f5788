"""`GenerationService`: the generation half of a run, from the engines' processes to scored rollouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import SlimeError
from slime_core.former_names import renamed
from slime_core.memory import Held
from slime_core.types import Account, Progress, RolloutBatch
from slime_rollout import serving_engines
from slime_rollout.serving_engines import GenerationSpec, ServingEngines

if TYPE_CHECKING:  # slow to import, and whoever only makes settings does not need it
    from slime_rollout.engine.config import EngineConfig
    from slime_rollout.engine.server import EngineLauncher
    from slime_rollout.rollout import RolloutManager

TURNS_FILE = "turns.jsonl"
"""Name of :class:`~slime_rollout.generate.TurnLog`'s file in ``--save``."""
_OF_ENGINES = {name: name for name in ("begin_update", "confirm_update", "fail_update", "evaluate", "sleep", "wake")}
_OF_ENGINES["score"] = "canary_log_probs"


class GenerationService:
    """Data, rewards and requests to a run's engines: `slime_core.interfaces.Batches`.

    :meth:`progress` and :meth:`cancel` may be called from another thread at any time; all others one after the other.

    Attributes:
        engines: Those that generate, with their memory and weights.
    """

    def __init__(
        self, spec: GenerationSpec, make_launcher: Callable[[EngineConfig], EngineLauncher] | None = None
    ) -> None:
        """Nothing is started yet. ``make_launcher`` gives what starts the engines; on this host if it is ``None``."""
        self.engines = ServingEngines(spec, make_launcher)

    def start(self) -> None:
        """Start router and engines, and read the prompts meanwhile; a `SlimeError` if something cannot be used."""
        from slime_rollout.engine.addresses import router_args
        from slime_rollout.generate import EngineClient, TurnLog
        from slime_rollout.hooks import check_hooks, hook_args_of
        from slime_rollout.rollout import RolloutData, RolloutManager
        from slime_rollout.teacher import make_teacher

        engines, spec = self.engines, self.engines.spec
        args = hook_args_of(spec.rollout, spec.flags)
        check_hooks(spec.rollout, args)  # errors of hooks and the teacher come before engines start
        teacher = make_teacher(spec.rollout)
        reader = ThreadPoolExecutor(max_workers=1)
        data = reader.submit(RolloutData.load, spec.rollout, args)
        reader.shutdown(wait=False)  # the error of an engine does not wait for the prompts
        engines.start()
        engines.said = Progress(note="reading prompts")
        client = EngineClient.of(
            spec.rollout,
            engines.fleet.router_url,
            retry_delays=retry_delays(spec.engine),
            cache_namespace=engines.namespace,
            key=spec.engine.key,
        )
        engines.generator = RolloutManager(
            spec.rollout,
            client=client,
            run_seed=spec.seed,
            data=data.result(),
            hook_args=args | router_args(client.url, engines.fleet.model_urls),
            on_progress=self._count_samples,
            teacher=teacher,
            turns=None if spec.turn_log is None else TurnLog(Path(spec.turn_log)),
        )
        engines.said = Progress(note="engines and router are up; the trainers are loading")

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score one rollout, to be trained from the version that was confirmed last.

        With ``--update-weights-interval`` the trainer may be further: after as many rollouts as have been trained on.
        """
        engines = self.engines
        engines.memory.require("generate", Held.EVERYTHING)
        late = engines.spec.rollout.selection.update_weights_interval > 1
        engines.said = Progress()
        try:
            return self._generator.generate(rollout_id, weight_version=rollout_id if late else engines.version)
        except SlimeError:
            engines.fleet.check()  # that an engine or the router is gone, with the end of its log, is the cause
            raise

    def account(self) -> Account:
        """The account of all samples so far."""
        return self._generator.account()

    def cancel(self) -> None:
        """End a :meth:`generate`, or an evaluation, that is under way, which raises `CancelledError`."""
        if self.engines.generator is not None:
            self.engines.generator.cancel()

    def state_dict(self) -> dict[str, Any]:
        """State of the data source."""
        return self._generator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the data source where ``state`` was saved."""
        self._generator.load_state_dict(state)

    def progress(self) -> Progress:
        """The last thing that happened; raises if an engine or the router is gone that nobody replaces."""
        return self.engines.progress()

    def close(self) -> None:
        """Stop asynchronous generation, then engines and router."""
        self.engines.stop()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A method that is now one of :attr:`engines`, with a warning."""
            if name not in _OF_ENGINES:
                raise AttributeError(f"GenerationService has no attribute {name!r}", name=name, obj=self)
            now = f"GenerationService.engines.{_OF_ENGINES[name]}"
            text = f"GenerationService.{name} is now {now}; the old name goes with the next release"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(self.engines, _OF_ENGINES[name])

    @property
    def _generator(self) -> RolloutManager:
        if self.engines.generator is None:
            raise SlimeError(serving_engines.NOT_STARTED)
        return self.engines.generator

    def _count_samples(self, done: int, total: int) -> None:
        self.engines.said = Progress(done, total)


def retry_delays(engine: EngineConfig) -> tuple[float, ...]:
    """Seconds before each retry of a request: with fault tolerance, until an engine has failed for good."""
    from slime_rollout.http import RETRY_DELAYS, patient_delays

    if not engine.use_fault_tolerance:
        return RETRY_DELAYS
    noticed = engine.rollout_health_check_interval + engine.rollout_health_check_timeout
    return patient_delays((noticed + engine.engine_startup_timeout) * (engine.rollout_max_restarts + 1))


_MOVED = ("CacheNamespace", "NOT_STARTED", "longest_sample", "start_receiver")
__getattr__ = renamed(
    __name__,
    {"ChannelSpec": "slime_rollout.engine.channels.ChannelSpec"}
    | {name: f"slime_rollout.serving_engines.{name}" for name in _MOVED},
)
