"""Files of a checkpoint: read inside its own directory, written whole or not at all. No torch in this package."""

from slime_convert.files.inside import file_inside, open_file, read_file, read_json, refuse_missing

__all__ = ["file_inside", "open_file", "read_file", "read_json", "refuse_missing"]
