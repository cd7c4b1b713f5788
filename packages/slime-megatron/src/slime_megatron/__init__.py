"""slime_megatron."""
