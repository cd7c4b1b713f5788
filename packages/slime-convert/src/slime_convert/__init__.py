"""slime_convert."""
