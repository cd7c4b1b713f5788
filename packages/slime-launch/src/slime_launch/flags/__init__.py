"""The strict command line: tables of flags in, typed settings out. Nothing here imports torch or Ray."""
