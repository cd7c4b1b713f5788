"""The errors of slime-convert. A message says what was given, what is allowed, and what to do."""


class ConvertError(Exception):
    """Base of every error that slime-convert raises on purpose. The command line prints its text and exits with 2."""


class HfConfigError(ConvertError):
    """A Hugging Face directory or its ``config.json`` is missing, unreadable or incomplete."""


class UnsupportedModelError(ConvertError):
    """A model family, or a setting of a known family, that slime-convert cannot convert."""


class ShapeMismatchError(ConvertError):
    """Shape flags, or a checkpoint's recorded arguments, contradict the Hugging Face config."""


class WeightError(ConvertError):
    """A weight is missing, unknown, or has another shape than the model's config says."""


class CheckpointError(ConvertError):
    """No checkpoint can be read, or it is of another format than is needed."""


class GgufError(ConvertError):
    """A GGUF file is ambiguous or cannot be read."""


class OutputError(ConvertError):
    """The output directory already exists or cannot be written."""


class AdapterError(ConvertError):
    """A LoRA adapter cannot be read, is of a kind that is not merged, or is for another model."""


class CheckError(ConvertError):
    """A model cannot be checked: what the check needs is not installed, or no tiny model can be made of the config."""


class UnfinishedError(ConvertError):
    """A directory is given as a checkpoint in which a conversion is under way or was interrupted."""


class QuantizationError(ConvertError):
    """A model is quantized already, is not, or is so in a way that slime-convert does not read."""


class ToleranceError(ConvertError):
    """The tolerance of a comparison is negative or not a number."""
