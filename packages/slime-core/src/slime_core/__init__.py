"""The algorithms, types and interfaces of slime. Importing this does not import torch; `slime_core.ops` does."""
