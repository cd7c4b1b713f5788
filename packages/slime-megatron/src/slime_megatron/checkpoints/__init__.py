"""Checkpoints: found, read and written together with the other ranks."""
