"""slime_rollout."""
