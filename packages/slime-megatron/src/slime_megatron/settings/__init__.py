"""The settings, and all that can be said of a run before it starts. No torch here."""
