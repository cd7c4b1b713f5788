"""The flags that a command line may have."""

from slime_launch.flags import command

KNOWN = {spec.name: spec for group in command(["--a-flag-of-megatrons"])[0] for spec in group.flags}
