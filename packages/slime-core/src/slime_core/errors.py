"""The errors of slime's packages. A message says what was given, what is allowed, and what to do."""


class SlimeError(Exception):
    """Base of every error that slime raises on purpose. The command line prints its text and exits with 2."""


class ConfigError(SlimeError):
    """A flag, or a combination of flags, that cannot work."""


class DataError(SlimeError):
    """A prompt file, sample or batch that breaks its documented format."""
