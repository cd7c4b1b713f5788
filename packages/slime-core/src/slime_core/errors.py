"""The errors of slime's packages. A message says what was given, what is allowed, and what to do."""


class SlimeError(Exception):
    """Base of every error that slime raises on purpose. The command line prints its text and exits with 2."""


class ConfigError(SlimeError):
    """A flag, or a combination of flags, that cannot work."""


class DataError(SlimeError):
    """A prompt file, sample or batch that breaks its documented format."""


class IntegrityError(DataError):
    """Bytes or a tensor that are not what their checksum or their head says."""


class DamagedError(IntegrityError):
    """Bytes that were cut off, altered, or made by something else."""


class FormatVersionError(IntegrityError):
    """Bytes in a version of their format that this slime does not read."""


class WrongBaseError(IntegrityError):
    """A tensor that is not the version a delta was made from."""
