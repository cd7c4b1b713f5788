"""slime_launch."""
