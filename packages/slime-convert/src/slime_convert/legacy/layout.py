"""Which file of a legacy checkpoint holds which rank's part of the model. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from slime_convert.errors import CheckpointError

FILES = ("model_optim_rng.pt", "model_rng.pt")
"""A rank's file; the second, beside a distributed optimizer of older Megatron."""

_SHOWN = 8
_DIRECTORY = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")


@dataclass(frozen=True, order=True)
class Rank:
    """A place in the parallel layout: tensor-, pipeline- and expert-parallel rank."""

    tensor: int
    pipeline: int = 0
    expert: int = 0


@dataclass(frozen=True)
class Parallel:
    """The parallel layout that wrote a checkpoint.

    Attributes:
        tensor: Tensor-parallel size.
        pipeline: Pipeline-parallel size.
        expert: Expert-parallel size.
        expert_tensor: Tensor-parallel size of the experts.
    """

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


def rank_files(iteration: Path) -> dict[tuple[int, ...], Path]:
    """The ranks' files by the numbers in their directory's name: tensor rank, then pipeline, expert, both or neither.

    Raises:
        CheckpointError: There are none, or the names differ in the count of numbers.
    """
    found: dict[tuple[int, ...], Path] = {}
    for directory in sorted(iteration.iterdir()):
        match = _DIRECTORY.match(directory.name)
        if match is None:
            continue
        path = next((directory / name for name in FILES if (directory / name).is_file()), None)
        if path is None:
            raise CheckpointError(f"{directory} has no {FILES[0]}; the checkpoint is incomplete, use another")
        found[tuple(int(number) for number in match.groups() if number is not None)] = path
    if len({len(numbers) for numbers in found}) != 1:
        raise CheckpointError(
            f"{iteration} must have directories mp_rank_XX, or all mp_rank_XX_YYY, or all mp_rank_XX_YYY_ZZZ; "
            f"it has {', '.join(path.parent.name for path in found.values()) or 'none'}; use one whole checkpoint"
        )
    return found


def by_rank(
    files: Mapping[tuple[int, ...], Path], args: Mapping[str, Any], first_stage: bool, iteration: Path
) -> tuple[dict[Rank, Path], Parallel]:
    """What the numbers in the directories' names mean.

    A second number alone is the pipeline rank or the expert rank, which only the arguments tell; without them, every
    expert rank of the first stage has the embedding, and no later stage has.

    Args:
        files: From :func:`rank_files`.
        args: The arguments that the checkpoint records; may be empty.
        first_stage: Whether the last of the files holds the embedding.
        iteration: For messages.

    Raises:
        CheckpointError: A rank's file is missing, or the layout cannot be read.
    """
    count = len(next(iter(files)))
    is_expert = count == 2 and _size(args, "pipeline_model_parallel_size", 1 if first_stage else 2) == 1
    ranks = {Rank(key[0], 0, key[1]) if is_expert else Rank(*key): path for key, path in files.items()}
    sizes = {
        "tensor": _size(args, "tensor_model_parallel_size", 1 + max(rank.tensor for rank in ranks)),
        "pipeline": _size(args, "pipeline_model_parallel_size", 1 + max(rank.pipeline for rank in ranks)),
        "expert": _size(args, "expert_model_parallel_size", 1 + max(rank.expert for rank in ranks)),
    }
    parallel = Parallel(**sizes, expert_tensor=_size(args, "expert_tensor_parallel_size", sizes["tensor"]))
    if parallel.tensor % parallel.expert_tensor:
        raise CheckpointError(
            f"{iteration} was saved with expert-tensor-parallel-size {parallel.expert_tensor}, which does not divide "
            f"tensor-model-parallel-size {parallel.tensor}, so that its ranks overwrote each other; use another"
        )
    _refuse_gaps(ranks, parallel, iteration)
    return ranks, parallel


def _refuse_gaps(ranks: Mapping[Rank, Path], parallel: Parallel, iteration: Path) -> None:
    tensor = {(rank.tensor, rank.pipeline) for rank in ranks}
    expert = {(rank.expert, rank.pipeline) for rank in ranks}
    # One by one, and never all: recorded sizes may be any number.
    missing = chain(
        (
            f"tensor rank {t} of stage {p}"
            for t in range(parallel.tensor)
            for p in range(parallel.pipeline)
            if (t, p) not in tensor
        ),
        (
            f"expert rank {e} of stage {p}"
            for p in range(parallel.pipeline)
            for e in range(parallel.expert)
            if (e, p) not in expert
        ),
    )
    if told := list(islice(missing, _SHOWN + 1)):
        more = " and more" if len(told) > _SHOWN else ""
        raise CheckpointError(
            f"{iteration} was saved by tensor {parallel.tensor} × pipeline {parallel.pipeline} × expert "
            f"{parallel.expert} ranks, but has no mp_rank_* directory of {', '.join(told[:_SHOWN])}{more}; "
            "use a whole checkpoint"
        )


def _size(args: Mapping[str, Any], name: str, default: int) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and value > 0 else default
