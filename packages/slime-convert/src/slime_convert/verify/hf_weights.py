"""The weights of a Hugging Face directory, as :class:`slime_convert.checkpoint.Weights` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from slime_convert.checkpoint import ITEM_BYTES, Naming, TensorInfo
from slime_convert.contents import read_config, shape_of
from slime_convert.errors import HfConfigError, WeightError
from slime_convert.mapping import WeightMap
from slime_convert.safetensors_files import read_directory


class HfWeights:
    """The tensors of a Hugging Face directory as they are stored. One file is open at a time, and none is mapped.

    Args:
        directory: Holds ``*.safetensors``.

    Raises:
        HfConfigError: A file is missing, cut off or damaged.
    """

    naming: Naming = "huggingface"
    arguments: Mapping[str, Any] = {}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._entries = read_directory(directory)
        # Frequencies that old Llama files store follow from the config.
        self.tensors = {
            name: TensorInfo(name, entry.dtype, entry.shape, entry.nbytes)
            for name, entry in self._entries.items()
            if not name.endswith(".rotary_emb.inv_freq")
        }
        config = read_config(directory)
        tied = config.get("tie_word_embeddings")
        self.tied = tied if isinstance(tied, bool) else None
        self.shape = shape_of(config)
        self._file: IO[bytes] | None = None
        self._path: Path | None = None

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def named(self, weight_map: WeightMap) -> Mapping[str, TensorInfo]:
        """The tensors: their names are Hugging Face's already."""
        return self.tensors

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightError: Its type is none of torch's.
            HfConfigError: It cannot be read, or its checksum, if the file has one, is wrong.
        """
        entry = self._entries[name]
        if entry.dtype not in ITEM_BYTES:
            raise WeightError(
                f"{name} of {self.directory} has type {entry.dtype}, which cannot be compared; "
                f"allowed: {', '.join(ITEM_BYTES)}; compare a checkpoint of one of these"
            )
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        try:
            file = self._opened(entry.path)
            file.seek(entry.offset)
            read = file.readinto(data.numpy()) if entry.nbytes else 0  # type: ignore[attr-defined]
        except OSError as error:
            raise HfConfigError(f"cannot read {entry.path} ({error}); fetch the model again") from error
        if read != entry.nbytes:
            raise HfConfigError(f"{entry.path} was cut off while it was read; fetch the model again")
        entry.check(name, data.numpy().data)
        return data.view(getattr(torch, entry.dtype)).view(entry.shape)

    def _opened(self, path: Path) -> IO[bytes]:
        if self._file is None or self._path != path:
            if self._file is not None:
                self._file.close()
            self._file, self._path = path.open("rb"), path
        return self._file
