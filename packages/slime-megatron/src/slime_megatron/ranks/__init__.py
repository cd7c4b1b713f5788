"""The device of a rank, and how ranks talk to each other."""
