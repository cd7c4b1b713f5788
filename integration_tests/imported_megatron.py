"""What a trainer rank on a CPU imports. The process that `ranks` forks its ranks from imports this, once."""

from slime_core.importing import without_collections
from slime_megatron.ranks.device import install_cpu_device

with without_collections():
    install_cpu_device()
    import slime_megatron.worker  # noqa: F401
