"""A command as a file of flags."""

import json


def as_file(flags, path):
    """The flags of a command as a YAML file; JSON is YAML."""
    path.write_text(
        json.dumps({name.removeprefix("--").replace("-", "_"): value or True for name, value in flags.items()})
    )
    return str(path)
