"""What the rank processes of `scripts/gpu-check` are asked to compute. No torch until one is asked."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import multiprocessing
import platform
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_check.processes import CALL_SECONDS, STOP_SECONDS, CheckError
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous, TrainSample, TrainShard, WeightUpdate
from slime_megatron.service import MegatronConfig, start_worker

if TYPE_CHECKING:
    import torch

    from slime_megatron.worker import MegatronWorker

VERSIONS = ("torch", "megatron-core", "transformer-engine", "flash-attn", "transformers", "slime-megatron")


@contextlib.contextmanager
def working(
    meeting: Rendezvous, config: MegatronConfig, shape: ModelShape, algorithm: AlgorithmConfig | None = None
) -> Iterator[MegatronWorker]:
    """A worker for as long as the block runs."""
    worker = start_worker(config, algorithm or AlgorithmConfig(), shape, meeting)
    try:
        yield worker
    finally:
        worker.close()


def facts(meeting: Rendezvous) -> dict[str, Any]:
    """What the machine has; what of torch the device layer replaced. Must be asked first of a process."""
    import torch

    before = _replaceable()
    from slime_megatron.ranks.device import select_device

    device = select_device(1)
    replaced = [name for name, value in _replaceable().items() if value is not before.get(name)]
    from slime_megatron.model.kernels import found_kernels

    found = found_kernels(device)
    return {
        "replaced": replaced,
        "gpu": None if device.is_cpu else torch.cuda.get_device_name(),
        "gpu_bytes": None if device.is_cpu else torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
        "transformer_engine": found.transformer_engine,
        "flash": found.flash,
    }


def _replaceable() -> dict[str, Any]:
    """The functions that the stand-ins for CPUs replace, and all others."""
    import torch

    owners = {"cuda": torch.cuda, "random": torch.cuda.random, "torch": torch, "distributed": torch.distributed}
    found = {f"{name}.{key}": value for name, owner in owners.items() for key, value in vars(owner).items()}
    return {
        **{name: value for name, value in found.items() if callable(value) and not isinstance(value, type)},
        **{f"Tensor.{name}": getattr(torch.Tensor, name) for name in ("type", "cuda")},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def logits(
    meeting: Rendezvous, config: MegatronConfig, shape: ModelShape, batches: Sequence[Sequence[TrainSample]]
) -> NDArray[np.float32]:
    """Logits that predict the trained tokens, N × V, of micro-batches one after the other; on one rank."""
    import torch

    with working(meeting, config, shape) as worker, torch.no_grad():
        from slime_megatron.model.build import output_weight, run
        from slime_megatron.model.packing import MicroBatch

        [chunk] = worker.model
        parts = []
        for samples in batches:
            batch = MicroBatch(samples, share_prompts=config.share_prompts).pack(
                next(worker._roles.device_tensors()).device
            )
            hidden = run(chunk, batch)[0].index_select(0, batch.logit_rows_M)
            parts.append((hidden @ output_weight(chunk).t())[:, : shape.vocab_size].float().cpu().numpy())
    return np.concatenate(parts)


class KeptWeights:
    """A channel that keeps what it is sent, on the CPU in fp32."""

    def __init__(self) -> None:
        self.tensors: dict[str, NDArray[np.float32]] = {}

    def begin(self, update: WeightUpdate) -> None:
        """Nothing to prepare."""

    def send(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> int:
        """Copy the tensors."""
        self.tensors.update({name: tensor.detach().float().cpu().numpy().copy() for name, tensor in bucket})
        return sum(tensor.nbytes for _, tensor in bucket)

    def end(self) -> dict[str, str]:
        """There are no checksums."""
        return {}

    def close(self) -> None:
        """Nothing to give back."""


class Trained(NamedTuple):
    """Each step's metrics; on rank 0 the first step's gradients, if ranks have them whole, and the weights at last."""

    steps: list[dict[str, float]]
    gradients: dict[str, NDArray[np.float32]]
    weights: dict[str, NDArray[np.float32]]


def train(
    meeting: Rendezvous,
    config: MegatronConfig,
    shape: ModelShape,
    algorithm: AlgorithmConfig,
    shards: Sequence[TrainShard],
) -> Trained:
    """Train on a rollout."""
    with working(meeting, config, shape, algorithm) as worker:
        divided = config.use_distributed_optimizer and len(shards) > 1
        with contextlib.ExitStack() as stack:
            gradients = {} if divided else stack.enter_context(_first_gradients(worker))
            steps = worker.train(shards[worker.data_parallel_rank]).steps
        kept = KeptWeights()
        worker.push(WeightUpdate(version=1), kept)
    return Trained(steps, gradients, kept.tensors)


@contextlib.contextmanager
def _first_gradients(worker: MegatronWorker) -> Iterator[dict[str, NDArray[np.float32]]]:
    """Gather the gradients that the block's first optimizer step is taken with, as weights are gathered."""
    from slime_megatron.model.build import named_weights as named
    from slime_megatron.weights import sync

    take_step = worker._roles.actor.optimizer.step
    kept = KeptWeights()

    def gradients(chunks: Any, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in named(chunks, **how):
            if hasattr(weight, "main_grad"):
                weight.main_grad.tensor_model_parallel = getattr(weight, "tensor_model_parallel", False)
                yield name, weight.main_grad

    def step() -> Any:
        if not kept.tensors:
            vars(sync)["named_weights"] = gradients
            try:
                kept.send(list(sync.WeightExport(worker.model, worker.shape).tensors()))
            finally:
                vars(sync)["named_weights"] = named
            kept.tensors.setdefault("", np.zeros(0, np.float32))  # on other ranks than 0: they have been gathered
        return take_step()

    worker._roles.actor.optimizer.step = step
    try:
        yield kept.tensors
    finally:
        worker._roles.actor.optimizer.step = take_step


def offload(
    meeting: Rendezvous, config: MegatronConfig, shape: ModelShape, shards: Sequence[TrainShard]
) -> dict[str, Any]:
    """Bytes that the trainer holds, of them those left asleep and in between; whether all tensors came back.

    Goes through every state of `slime_core.memory.MemoryState`, pushes where weights alone are there, and trains before
    and after. On a GPU bytes are those of all of torch's tensors; a process on a CPU is larger than a tiny model by
    far, so there they are those of the trainer's own.
    """
    import torch

    from slime_megatron.weights.offload import resident_bytes

    with working(meeting, config, shape) as worker:
        worker.train(shards[0])
        before, first, again = _hashes(worker), KeptWeights(), KeptWeights()
        worker.push(WeightUpdate(version=1), first)
        on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
        held = resident_bytes(worker._roles._device)
        half = worker.sleep(keep_weights=True)
        worker.push(WeightUpdate(version=2), again)
        asleep = worker.sleep()
        worker.wake(weights_only=True)
        worker.wake()
        equal = _hashes(worker) == before and _same(first.tensors, again.tensors)
        worker.train(shards[0])
    if not on_gpu:
        return {"held": asleep.waiting, "half": half.device, "left": asleep.device, "equal": equal}
    return {"held": held, "half": half.resident, "left": asleep.resident, "equal": equal}


def _same(first: Mapping[str, NDArray[np.float32]], second: Mapping[str, NDArray[np.float32]]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def _hashes(worker: MegatronWorker) -> list[str]:
    return [digest(tensor) for tensor in worker._roles.device_tensors()]


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # Of a copy: a storage that NumPy has seen cannot be emptied.
    return hashlib.sha256(flat.to("cpu", copy=True).numpy().tobytes()).hexdigest()


def push(meeting: Rendezvous, config: MegatronConfig, shape: ModelShape) -> dict[str, Any]:
    """Send the weights as the launcher does to engines on the same GPU, but to a process that only reads them."""
    from slime_rollout.engine.channels import ChannelSpec
    from slime_rollout.weights.buckets import TensorWeightChannel, _handle

    class Reading(KeptWeights):
        """Sends handles to another process, and keeps the checksums of what that one reads."""

        def __init__(self) -> None:
            super().__init__()
            context = multiprocessing.get_context("spawn")
            self.sent: dict[str, str] = {}
            self.read: dict[str, str] = {}
            self.device = ""
            self._channel = TensorWeightChannel(ChannelSpec((), colocate=True))
            self._end, theirs = context.Pipe()
            self._process = context.Process(target=_read, args=(theirs,))
            self._process.start()

        def send(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> int:
            self.sent.update({name: digest(tensor) for name, tensor in bucket})
            flat, metadata = self._channel._copied(bucket)
            self.device = flat.device.type
            self._end.send(_handle(flat, metadata))
            if not self._end.poll(CALL_SECONDS):
                raise CheckError("the reading process did not answer")
            self.read.update(self._end.recv())
            return flat.nbytes

        def close(self) -> None:
            self._end.close()
            self._process.join(STOP_SECONDS)
            self._channel.close()

    with working(meeting, config, shape) as worker:
        channel = Reading()
        try:
            report = worker.push(WeightUpdate(version=1), channel)
        finally:
            channel.close()
    return {"equal": channel.sent == channel.read, "tensors": report.tensors, "device": channel.device}


def _read(connection: Connection) -> None:
    """Read buckets where they are; answer with the checksums of their tensors."""
    from multiprocessing.reduction import ForkingPickler

    import torch  # noqa: F401  (defines how tensors are read)

    with contextlib.suppress(EOFError):
        while True:
            received = ForkingPickler.loads(base64.b64decode(connection.recv()))
            flat = received["flattened_tensor"]
            found = {entry.name: digest(flat[entry.start_idx : entry.end_idx]) for entry in received["metadata"]}
            del received, flat
            connection.send(found)
