"""The training half of slime, on Megatron-core. Importing this changes nothing; see `slime_megatron.worker`."""
