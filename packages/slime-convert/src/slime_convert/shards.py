"""The weights of a Hugging Face directory, written one by one to safetensors files and continued where they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from slime_convert.ahead import made_ahead
from slime_convert.progress import OnProgress, no_progress
from slime_convert.safetensors_files import INDEX
from slime_convert.shard_file import ShardFile, TensorSpec

DEFAULT_SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Step:
    """Tensors that are made together, when their turn comes.

    Attributes:
        specs: What will come.
        make: Makes the tensors of ``specs``, in the same order.
    """

    specs: tuple[TensorSpec, ...]
    make: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def take(self) -> list[Tensor]:
        """Make the tensors, each contiguous.

        Raises:
            ValueError: A tensor is not as its spec says, or there are more or fewer.
        """
        tensors = list(self.make())
        for spec, tensor in zip(self.specs, tensors, strict=True):
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise ValueError(f"{spec.name} must be {spec}, not {tensor.dtype} {tuple(tensor.shape)}")
        return [tensor.contiguous() for tensor in tensors]


def write_shards(
    directory: Path,
    steps: Sequence[Step],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Write weights as ``model.safetensors``, or as numbered shards with an index, in the order of the steps.

    Files of the same specs that an earlier call left unfinished are continued: a tensor whose checksum is right stays,
    and a step of which every tensor stays is not taken.

    Args:
        directory: Where the files go.
        steps: The weights, in the order of the shards. While one is written, a thread makes the next.
        max_shard_bytes: Largest shard, in bytes of tensors; a single larger tensor makes a shard of its own.
        on_progress: Told the bytes that stay, then those that are written after each step.

    Raises:
        ValueError: A tensor is not as its spec says, or a step makes more or fewer than its specs.
        OSError: The disk is full, or cannot be written.
    """
    specs = [spec for step in steps for spec in step.specs]
    files = _files(directory, _split(specs, max_shard_bytes))
    file_of = {name: file for file in files for name in file.names}
    finished = {name for file in files for name in file.begin()}
    total = sum(spec.nbytes for spec in specs)
    done = sum(spec.nbytes for spec in specs if spec.name in finished)
    on_progress(done, total)
    left = [step for step in steps if any(spec.name not in finished for spec in step.specs)]
    with ExitStack() as open_file, closing(made_ahead((step.nbytes, step.take) for step in left)) as taken:
        for step in left:
            missing = {spec.name: spec.nbytes for spec in step.specs if spec.name not in finished}
            _write(step, next(taken), {name: file_of[name] for name in missing}, open_file)
            done += sum(missing.values())
            on_progress(done, total)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file.path.name for name, file in file_of.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def _files(directory: Path, shards: Sequence[Sequence[TensorSpec]]) -> list[ShardFile]:
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    return [ShardFile(directory / name, shard) for name, shard in zip(names, shards, strict=True)]


def _write(step: Step, tensors: Sequence[Tensor], file_of: dict[str, ShardFile], open_file: ExitStack) -> None:
    """Write those tensors of a step that have a file here. One file at a time is open."""
    for spec, tensor in zip(step.specs, tensors, strict=True):
        file = file_of.get(spec.name)
        if file is not None:
            if not file.is_open:
                open_file.close()
                open_file.enter_context(file)
            file.write(spec, tensor)


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for spec in specs:
        if shards[-1] and spec.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.nbytes
    return shards
