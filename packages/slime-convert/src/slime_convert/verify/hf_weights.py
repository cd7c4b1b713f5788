"""The weights of a Hugging Face directory, as :class:`slime_convert.checkpoint.Weights` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from slime_convert.checkpoint import ITEM_BYTES, Naming, TensorInfo, tensor_info
from slime_convert.contents import quantization_of, read_config, shape_of
from slime_convert.errors import HfConfigError, QuantizationError, WeightError
from slime_convert.mapping import WeightTranslation
from slime_convert.quantize.formats import Fp8Format, Int4Format, format_of, settings_of
from slime_convert.quantize.reader import open_weights
from slime_convert.safetensors_files import read_directory

_FREQUENCIES = ".rotary_emb.inv_freq"  # old Llama files store them; they follow from the config


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
        self.tensors = {
            name: TensorInfo(name, entry.dtype, entry.shape, entry.nbytes)
            for name, entry in self._entries.items()
            if not name.endswith(_FREQUENCIES)
        }
        config = read_config(directory)
        tied = config.get("tie_word_embeddings")
        self.tied = tied if isinstance(tied, bool) else None
        self.shape = shape_of(config)
        quantization = quantization_of(config)[0]
        self.storage = None if quantization is None else f"{quantization}; compared as stored"
        self.format = _format(config, directory) if quantization else None
        self._file: IO[bytes] | None = None
        self._path: Path | None = None

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
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

    def expanded(self) -> ExpandedWeights:
        """The same weights as if they had never been quantized.

        Raises:
            ConvertError: They are quantized in a way that is not read, or not as the config says.
        """
        return ExpandedWeights(self)

    def _opened(self, path: Path) -> IO[bytes]:
        if self._file is None or self._path != path:
            if self._file is not None:
                self._file.close()
            self._file, self._path = path.open("rb"), path
        return self._file


class ExpandedWeights:
    """The weights of a quantized Hugging Face directory, as if they had never been quantized. Use it in ``with``.

    Args:
        stored: The same directory.

    Raises:
        ConvertError: They are quantized in a way that is not read, or not as the config says.
    """

    naming: Naming = "huggingface"
    arguments: Mapping[str, Any] = {}

    def __init__(self, stored: HfWeights) -> None:
        self.directory, self.tied, self.shape = stored.directory, stored.tied, stored.shape
        self.storage = f"{stored.format}; expanded to bfloat16"
        self._reader = open_weights(stored.directory)
        specs = [self._reader.spec(name) for name in self._reader.names_in_order if not name.endswith(_FREQUENCIES)]
        self.tensors = {
            spec.name: tensor_info(spec.name, str(spec.dtype).removeprefix("torch."), spec.shape) for spec in specs
        }

    def __enter__(self) -> ExpandedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The tensors: their names are Hugging Face's already."""
        return self.tensors

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            ConvertError: It cannot be read.
        """
        return self._reader.load(name)


def _format(config: Mapping[str, Any], directory: Path) -> Fp8Format | Int4Format | str:
    """How weights are quantized; of a way that is not read, what the config says of it."""
    try:
        return format_of(config, str(directory / "config.json")) or ""
    except QuantizationError:
        return str(settings_of(config))
