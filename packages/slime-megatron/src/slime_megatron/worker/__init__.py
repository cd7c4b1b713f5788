"""One rank of the training half. Importing this imports Megatron: see `slime_megatron.service`."""

from slime_megatron.worker.worker import MegatronWorker

__all__ = ["MegatronWorker"]
