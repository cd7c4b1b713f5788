"""``slime-launch plan``: what a command would do and need, before anything is started."""
