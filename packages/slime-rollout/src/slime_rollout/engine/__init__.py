"""SGLang engines: their flags, their processes, the router before them. Here: what can go wrong with them."""

from collections.abc import Collection

from slime_core.errors import SlimeError


class EngineError(SlimeError):
    """Base of all errors of engines, the router and the weight channels."""


class PortInUseError(EngineError):
    """A port that was asked for is taken."""


class NoRoomError(EngineError):
    """No node has room for an engine now; one may have it later."""


class EngineStartError(EngineError):
    """An engine or the router did not come up."""


class EngineDiedError(EngineError):
    """An engine or the router ended by itself."""


class EngineRestartsError(EngineDiedError):
    """An engine or the router failed once more than ``--rollout-max-restarts`` allows to replace it."""


class ExternalEngineError(EngineError):
    """An external engine does not report what it is, or does not fit the run."""


class WeightSyncError(EngineError):
    """An engine refused new weights, or does not confirm their version.

    Attributes:
        url: The engine, or its receiver, that caused the error; ``None`` if no single one did.
        silent: Addresses of all that gave no answer in time, where no other engine is the cause. ``url`` may be among
            them.
    """

    def __init__(self, message: str, *, url: str | None = None, silent: Collection[str] = ()) -> None:
        super().__init__(message)
        self.url = url
        self.silent = tuple(silent)
