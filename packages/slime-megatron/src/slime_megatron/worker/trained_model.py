"""The models of a worker by role: those that are trained, and frozen ones as weights that wait in host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_core.interfaces import Role
from slime_core.memory import Held, MemoryState
from slime_megatron.checkpoints.background import Background
from slime_megatron.checkpoints.contents import check_continues, load_checkpoint, load_weights
from slime_megatron.checkpoints.find import OLD_ACTOR, CheckpointInfo, checkpoint_root, find_checkpoint
from slime_megatron.checkpoints.writer import save_checkpoint
from slime_megatron.errors import TrainingError
from slime_megatron.model.build import Chunks, build_model, freeze_weights, named_weights
from slime_megatron.model.lora import add_adapters, base_weights, reset_adapters
from slime_megatron.ranks.device import Device
from slime_megatron.ranks.parallel import seed_everything
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.step.optimizer import build_optimizer, build_scheduler, wrap_model
from slime_megatron.weights.host_copies import HostWeights, all_weights
from slime_megatron.weights.offload import OffloadStore
from slime_megatron.weights.versions import KeptVersions


class TrainedModel:
    """A model with its optimizer, learning-rate schedule and checkpoint directory.

    Attributes:
        config: Settings of this role.
        model: The chunks of this rank.
        frozen: Weights of other models of the same shape, by role; ``None`` is this one without its adapters.
        wrapped: The chunks with their gradient buffers.
        versions: Its earlier weights, ``keep_versions`` of them.
    """

    def __init__(
        self,
        config: MegatronConfig,
        shape: ModelShape,
        device: Device,
        *,
        source: str | Path | None,
        resumed: bool,
        value_head: bool = False,
        frozen: Mapping[str, Path | None] | None = None,
        keep_versions: int | None = None,
        offload_dir: Path = Path(),
        only_evaluates: bool = False,
    ) -> None:
        """Build the model with ``source``'s weights; random ones without it, unless it is ``resumed`` later.

        Weights of the ``frozen`` roles come from their directories; without one they are these first weights. On a CPU
        what :meth:`sleep` takes waits in a file in ``offload_dir``. A model that ``only_evaluates`` has no gradients
        and no optimizer.
        """
        self.config, self.shape, self._only_evaluates = config, shape, only_evaluates
        seed_everything(config.seed)
        self.model = build_model(
            shape, config, device, random_weights=source is None and not resumed, value_head=value_head
        )
        if config.lora is not None:
            add_adapters(self.model, shape, config.lora, config.seed)
        loaded = None if source is None else find_checkpoint(source)
        if loaded is not None:
            load_weights(loaded, shape, self.model)
        self.frozen = {
            role: None if role == "reference" and config.base_is_reference else self._frozen(directory, loaded)
            for role, directory in (frozen or {}).items()
        }
        self.versions = None if keep_versions is None else KeptVersions(self.model, keep_versions)
        freeze_weights(self.model, config)
        if only_evaluates:
            for chunk in self.model:
                chunk.requires_grad_(False)
        self.wrapped = wrap_model(self.model, shape, config, device)
        self._device = device
        self._memory = MemoryState("a model")
        self._weights, self._optimizer_state = (OffloadStore(device, offload_dir) for _ in range(2))
        if not (device.is_cpu or only_evaluates):
            _ = self.optimizer  # a GPU has room for it, or this is the time to say so

    @functools.cached_property
    def _optimizer(self) -> tuple[Any, Any]:
        """Optimizer and schedule. The first rollout does without: they are built when one is first asked for."""
        if self._only_evaluates:
            raise ConfigError(
                "this model was built to evaluate alone; start the worker without only_evaluates to train"
            )
        optimizer = build_optimizer(self.wrapped, self.shape, self.config, self._device)
        return optimizer, build_scheduler(optimizer, self.config)  # which sets the rate of the first step

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer."""
        return self._optimizer[0]

    @property
    def scheduler(self) -> Any:
        """The schedule of the learning rate."""
        return self._optimizer[1]

    def _frozen(self, directory: Path | None, loaded: CheckpointInfo | None) -> HostWeights:
        """The weights in a directory; those of the model now without one, and if they were ``loaded`` just now."""
        own = HostWeights(self.model)
        if directory is None or (self.config.lora is None and find_checkpoint(directory) == loaded):
            return own
        reset_adapters(self.model)
        load_weights(find_checkpoint(directory), self.shape, self.model)
        found = HostWeights(self.model)
        own.put(self.model)
        return found

    @contextlib.contextmanager
    def as_other(self, other: Role | int) -> Iterator[Chunks]:
        """Have the weights of a frozen role, or of an earlier version, in the model's place while the block runs."""
        self.gather_weights()
        versions = self.versions
        held = versions.copies[other] if versions is not None and isinstance(other, int) else self.frozen[str(other)]
        with base_weights(self.model) if held is None else held.in_place(self.model):
            yield self.wrapped

    def update_frozen(self, role: str) -> None:
        """Take the model's weights of now for a frozen role."""
        self.gather_weights()
        self.frozen[role] = HostWeights(self.model)

    def gather_weights(self) -> None:
        """Have all weights of the last step here, which --overlap-param-gather leaves to the next forward pass."""
        for chunk in self.wrapped:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Put the routers' biases back if the step is not taken: Megatron moves them before the gradient is checked."""
        biases = [weight for name, weight in named_weights(self.model) if name.endswith(".expert_bias")]
        before = [bias.clone() for bias in biases]
        try:
            yield
        except TrainingError:
            for bias, earlier in zip(biases, before, strict=True):
                bias.copy_(earlier)
            raise

    def zero_gradients(self) -> None:
        """Empty the gradient buffers, before a step."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> dict[str, float]:
        """Take an optimizer step; its learning rate and the norm of the gradient."""
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return {"grad_norm": float(grad_norm), "lr": learning_rate}

    def save(self, iteration: int, background: Background | None = None) -> Path:
        """Write checkpoint ``iteration`` to this role's directory, and next to it the frozen weights that have changed.

        With ``background``, its own is written there while the run goes on; nothing may be under way.
        """
        self.gather_weights()
        parts = (self.shape, self.model, self.optimizer, self.scheduler, iteration)
        others: dict[str, HostWeights | None] = {}
        if self.config.ref_update_interval:
            others["reference"] = self.frozen.get("reference")
        if self.versions is not None:
            kept = sorted(self.versions.copies.items())
            others |= {f"{OLD_ACTOR}/{iteration - version}": held for version, held in kept}
        for name, held in others.items():
            if held is not None and self.config.save:
                only_weights = dataclasses.replace(self.config, save=f"{self.config.save}/{name}", no_save_optim=True)
                with held.in_place(self.model):
                    save_checkpoint(only_weights, *parts)
        return save_checkpoint(self.config, *parts, background=background)

    def load_weights(self, directory: str | Path) -> tuple[int, Path]:
        """Load only the weights of a checkpoint; gives its iteration and its own directory, for :meth:`load` later.

        Of a directory of checkpoints the newest may be another one by then.
        """
        found = find_checkpoint(directory)
        iteration, _ = check_continues(found, self.config)
        load_weights(found, self.shape, self.model)
        return iteration, found.directory

    def load(self, directory: str | Path) -> int:
        """Continue a checkpoint, with its optimizer, schedule and random state, and frozen weights that had changed."""
        found = find_checkpoint(directory)
        reference = checkpoint_root(directory) / "reference" / found.directory.name
        if self.config.ref_update_interval and "reference" in self.frozen and reference.is_dir():
            load_weights(find_checkpoint(reference), self.shape, self.model)
            self.update_frozen("reference")
        if self.versions is not None:
            self.versions.clear()
            for old in (checkpoint_root(found.directory) / OLD_ACTOR).glob(f"*/{found.directory.name}"):
                load_weights(find_checkpoint(old), self.shape, self.model)
                self.versions.copies[(found.iteration or 0) - int(old.parent.name)] = HostWeights(self.model)
        if self._only_evaluates:
            return self.load_weights(directory)[0]
        return load_checkpoint(found, self.config, self.shape, self.model, self.optimizer, self.scheduler)

    def sleep(self, keep_weights: bool = False) -> None:
        """Give device memory back: gradients, optimizer state and, unless they are kept, weights. Nothing twice."""
        had = self._memory.held
        if had <= (Held.WEIGHTS if keep_weights else Held.NOTHING):
            return
        with self._memory.sleeping(keep_weights):
            if had is Held.EVERYTHING:
                self.gather_weights()
                for chunk in self.wrapped:
                    chunk.offload_grad_buffers()
                self._optimizer_state.take(self.optimizer_state())
            if not keep_weights:
                self._weights.take(self.weights())
            torch.cuda.empty_cache()

    def wake(self, weights_only: bool = False) -> None:
        """Take it again, as it was to the bit; of what is there nothing."""
        if self._memory.held >= (Held.WEIGHTS if weights_only else Held.EVERYTHING):
            return
        with self._memory.waking(weights_only):
            self._weights.give_back()
            if not weights_only:
                self._optimizer_state.give_back()
                for chunk in self.wrapped:
                    chunk.restore_grad_buffers()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait elsewhere."""
        return self._weights.nbytes + self._optimizer_state.nbytes

    def weights(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers of the model."""
        return all_weights(self.model)

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradient buffers."""
        for chunk in self.wrapped:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """The optimizer's tensors on the device besides the model's own weights."""
        own = {tensor.untyped_storage().data_ptr() for tensor in self.weights()}
        for tensor in self._optimizer_tensors():
            if self._device.holds(tensor) and tensor.untyped_storage().data_ptr() not in own:
                yield tensor

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        if "_optimizer" not in vars(self):
            return
        for group in self.optimizer.param_groups:
            yield from group["params"]
        for part in self.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))
