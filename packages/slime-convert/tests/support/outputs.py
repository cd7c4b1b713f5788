"""Small outputs: written, or begun and stopped with an error."""

from slime_convert.files.output import MANIFEST, new_directory
from slime_convert.files.partial import Conversion

NO_ROOM = OSError(28, "No space left on device")


def conversion(*inputs, **options):
    return Conversion("test", inputs, options)


def write(target, text, *, force=False, names=("model",)):
    with new_directory(target, conversion(), force=force) as partial:
        for name in names:
            partial.write(name, text.encode())


def names_in(directory):
    return {path.name for path in directory.iterdir()} - {MANIFEST}


def write_half(target, error, what=None, *, force=False):
    """Begin, and stop with an error."""
    with new_directory(target, what or conversion(), force=force) as partial:
        partial.write("half", b"")
        raise error
