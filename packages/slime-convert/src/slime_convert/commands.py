"""The commands of ``slime-convert``: their flags, and the functions that they run, loaded when they do."""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import slime_convert
from slime_convert.progress import Converted, command_progress, printable, say
from slime_convert.shape import SHAPE_FLAGS

_CHECKPOINT = "Hugging Face directory, torch_dist or legacy torch checkpoint, or GGUF file"
_INPUTS = ("hf_checkpoint", "input_dir", "load", "gguf", "adapter", "origin_hf_dir")
_ADAPTER = "LoRA adapter of PEFT (adapter_config.json, adapter_model.safetensors)"

ARGUMENTS = {
    "force=True": "--force",
    "add_missing_from_origin_hf=True": "--add-missing-from-origin-hf",
    "max_shard_bytes=": "--max-shard-gib",
    "origin_hf_dir=": "--origin-hf-dir",
    "adapter=": "--adapter",
    "dtype=": "--dtype",
    "ignore=": "--ignore",
}
"""Flags by the arguments of a call from Python, as messages name them."""
_NAMED = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, ARGUMENTS))})(?=[ ,;)]|$)")


def in_flags(message: str) -> str:
    """A message about a call as one about a command."""
    return _NAMED.sub(lambda match: ARGUMENTS[match[0]], message)


class Flag:
    """A flag or a positional argument, as :meth:`argparse.ArgumentParser.add_argument` takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options


@dataclass(frozen=True)
class Subcommand:
    """One command: ``run`` takes its parsed flags and returns the exit code.

    ``help`` is one line, and ``epilog`` what else ``--help`` says; ``flags`` begin with those that matter most. With
    ``takes_shape``, Megatron's shape flags may be given too.
    """

    name: str
    help: str
    example: str
    flags: Sequence[Flag]
    run: Callable[[argparse.Namespace], int]
    takes_shape: bool = False
    epilog: str = ""


def positive(text: str) -> int:
    """A whole number of 1 or more, or argparse's error."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def named(text: str) -> str:
    """The name of a file or directory, which may not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("'' must be the name of a file or directory")
    return text


def _path(*names: str, help: str, metavar: str = "DIR", **options: Any) -> Flag:
    """A flag or argument that names a file or directory; a flag is required unless it says otherwise."""
    required = {"required": True} if names[0].startswith("-") else {}
    return Flag(*names, **required | options, metavar=metavar, type=named, help=help)


def _number(name: str, default: int, help_: str) -> Flag:
    return Flag(name, type=positive, default=default, metavar="N", help=f"{help_} (default: {default})")


def _convert(conversion: Callable[[], Callable[..., Converted]], args: argparse.Namespace) -> int:
    """Run a conversion: its flags become the parameters of their names. Naming its function loads its module."""
    given = {name: value for name, value in vars(args).items() if name not in ("run", "quiet")}
    if "num_layers" in given:
        given["flags"] = {flag.dest: given.pop(flag.dest) for flag in SHAPE_FLAGS}
        given.pop("ckpt_format", None)
    if "max_shard_gib" in given:
        given["max_shard_bytes"] = given.pop("max_shard_gib") * 2**30
    function = conversion()
    with _reading(*(given[name] for name in _INPUTS if given.get(name))):
        converted = function(**given, on_progress=command_progress(quiet=args.quiet))
    if not args.quiet:
        for note in converted.notes:
            say(f"slime-convert: note: {in_flags(note)}")
        try:
            for name in converted.copied:
                print(printable(f"copied from {args.origin_hf_dir}: {name}"))
            print(converted.to_text(), flush=True)
        except OSError as error:
            error.add_note(f"the conversion is complete: {converted.path}")
            raise
    return 0


@contextmanager
def _reading(*paths: str) -> Iterator[None]:
    """An error that names no file is about what is read, not about the output."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            gone = isinstance(error, FileNotFoundError)  # only the working directory is looked up without a name
            error.filename = "the working directory" if gone else " or ".join(paths)
        raise


def _inspect(args: argparse.Namespace) -> int:
    collecting = gc.isenabled()
    gc.disable()  # headers become many objects, and none is thrown away
    try:
        with _reading(args.checkpoint):
            found = slime_convert.inspect_checkpoint(args.checkpoint)
        _print(found, as_json=args.json)
    finally:
        if collecting:
            gc.enable()
    return 0


def _verify(args: argparse.Namespace) -> int:
    options = {"origin_hf_dir": args.origin_hf_dir, "tolerance": args.tolerance}
    with _reading(args.left, args.right):
        found = slime_convert.verify(args.left, args.right, **options, on_progress=command_progress(quiet=args.quiet))
    if args.json or not (args.quiet and found.equal):
        _print(found, as_json=args.json)
    return 0 if found.equal else 1


def _check_model(args: argparse.Namespace) -> int:
    with _reading(args.model):
        found = slime_convert.check_model(args.model, megatron=args.megatron)
    _print(found, as_json=args.json)
    return 0 if found.passed else 1


def _print(found: Any, *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(found.to_json(), indent=2))
    else:
        print(found.to_text())


def _list_models(args: argparse.Namespace) -> int:
    from slime_convert.published import model_table

    print(model_table())
    return 0


def _megatron_flags(args: argparse.Namespace) -> int:
    from slime_convert.published import flags_text

    with _reading(args.model):
        text = flags_text(args.model)
    print(text)
    return 0


_FORCE = Flag("-f", "--force", action="store_true", help="replace an earlier output of slime-convert")
_QUIET = Flag("-q", "--quiet", action="store_true", help="say nothing but errors")
_JSON = Flag("--json", action="store_true", help="print JSON instead of a table")
_SAVE = _path("--save", help="directory to create")
_HF = _path("--hf-checkpoint", help="Hugging Face directory")
_SHARDS = _number("--max-shard-gib", 5, "largest safetensors file in GiB")
_ADD_MISSING = Flag(
    *("-a", "--add-missing-from-origin-hf"),
    action="store_true",
    help="copy weights that the checkpoint lacks from that model (quantized: as bfloat16), and print their names",
)
_TO_HF = (_path("--output-dir", help="directory to create"), _FORCE, _ADD_MISSING, _SHARDS, _QUIET)


def _origin(*names: str) -> Flag:
    return _path(*names, dest="origin_hf_dir", help="model that training began with (config, tokenizer)")


def _quantizing(name: str, help_: str, run: Callable[[argparse.Namespace], int], *further: Flag) -> Subcommand:
    before, _, after = name.partition("-to-")
    example = f"{name} --hf-checkpoint {before}/ --save {after}/"
    return Subcommand(name, help_, example, (_HF, _SAVE, _FORCE, *further, _SHARDS, _QUIET), run)


COMMANDS = (
    Subcommand(
        "hf-to-torch-dist",
        "Hugging Face directory → Megatron torch_dist",
        "hf-to-torch-dist --hf-checkpoint Qwen3-4B --save Qwen3-4B_torch_dist",
        (
            _path("--hf-checkpoint", help="Hugging Face directory; FP8, INT4 and MXFP4 weights become bfloat16"),
            *(_SAVE, _FORCE),
            _path("--adapter", required=False, help=f"{_ADAPTER} to be merged in"),
            _number("--make-vocab-size-divisible-by", 128, "pad the embedding to a multiple of N rows"),
            _QUIET,
        ),
        partial(_convert, lambda: slime_convert.hf_to_torch_dist),
        takes_shape=True,
    ),
    Subcommand(
        "torch-dist-to-hf",
        "Megatron torch_dist → Hugging Face directory",
        "torch-dist-to-hf --input-dir runs/qwen3 --output-dir Qwen3-4B-RL --origin-hf-dir Qwen3-4B",
        (_path("--input-dir", help="checkpoint, or one iteration of it"), _origin("--origin-hf-dir"), *_TO_HF),
        partial(_convert, lambda: slime_convert.torch_dist_to_hf),
        takes_shape=True,
    ),
    Subcommand(
        "megatron-to-hf",
        "Megatron checkpoint, torch_dist or legacy torch → Hugging Face directory",
        "megatron-to-hf --load megatron/ --output-dir Qwen3-4B-RL --origin-hf-dir Qwen3-4B",
        (
            _path("--load", help="checkpoint, or one iteration of it"),
            _origin("--origin-hf-dir", "--hf-checkpoint"),
            *_TO_HF,
            Flag("--ckpt-format", choices=("torch", "torch_dist"), help="accepted but not needed: it is detected"),
        ),
        partial(_convert, lambda: slime_convert.megatron_to_hf),
        takes_shape=True,
    ),
    Subcommand(
        "gguf-to-hf",
        "GGUF file → Hugging Face directory (needs the gguf extra)",
        "gguf-to-hf --gguf model.gguf --save hf/",
        (
            _path("--gguf", metavar="PATH", help="GGUF file, or directory with exactly one"),
            *(_SAVE, _FORCE),
            Flag(
                "--dtype",
                choices=("float32", "bfloat16", "float16"),
                default="float32",
                help="type of the written weights (default: float32, which is exact)",
            ),
            *(_SHARDS, _QUIET),
        ),
        partial(_convert, lambda: slime_convert.gguf_to_hf),
    ),
    _quantizing(
        "hf-to-fp8",
        "quantize a Hugging Face directory to FP8, E4M3 in blocks of 128 by 128",
        partial(_convert, lambda: slime_convert.hf_to_fp8),
    ),
    _quantizing(
        "fp8-to-bf16",
        "expand a block-scaled FP8 directory, such as DeepSeek-V3's, to bfloat16",
        partial(_convert, lambda: slime_convert.fp8_to_bf16),
    ),
    _quantizing(
        "hf-to-int4",
        "quantize a Hugging Face directory to packed INT4",
        partial(_convert, lambda: slime_convert.hf_to_int4),
        Flag("--group-size", type=int, choices=(32, 128), default=32, help="columns that share a scale (default: 32)"),
        Flag(
            "--ignore",
            nargs="+",
            metavar="RULE",
            help="modules to leave as they are: names, or re:PATTERN (default: all but the routed experts if there are "
            "any, else lm_head)",
        ),
    ),
    _quantizing(
        "int4-to-bf16",
        "expand a packed INT4 directory, such as Kimi-K2's, to bfloat16",
        partial(_convert, lambda: slime_convert.int4_to_bf16),
    ),
    Subcommand(
        "merge-lora",
        "Hugging Face directory and a LoRA adapter → Hugging Face directory",
        "merge-lora --hf-checkpoint Qwen3-4B --adapter my-adapter/ --save Qwen3-4B-merged",
        (
            _path("--hf-checkpoint", help="model that the adapter was trained on"),
            _path("--adapter", help=_ADAPTER),
            *(_SAVE, _FORCE, _SHARDS, _QUIET),
        ),
        partial(_convert, lambda: slime_convert.merge_lora),
    ),
    Subcommand(
        "inspect",
        "say what a checkpoint holds (its headers are read, not its weights)",
        "inspect Qwen3-4B_torch_dist",
        (_path("checkpoint", metavar="PATH", help=_CHECKPOINT), _JSON),
        _inspect,
    ),
    Subcommand(
        "verify",
        "compare two checkpoints, of any two formats, weight by weight",
        "verify Qwen3-4B Qwen3-4B_torch_dist",
        (
            *(_path(side, metavar="PATH", help=_CHECKPOINT) for side in ("left", "right")),
            Flag(
                "--tolerance",
                type=float,
                metavar="X",
                help="accept absolute differences up to X, whatever the types (default: bits and types must be equal)",
            ),
            _path("--origin-hf-dir", required=False, help="config.json of both, if neither checkpoint gives the shape"),
            *(_JSON, _QUIET),
        ),
        _verify,
        epilog="Quantized weights are expanded, unless both checkpoints are quantized in the same way. "
        "Exit code: 0 if they are equal, 1 if they differ, 2 if they cannot be compared.",
    ),
    Subcommand(
        "check-model",
        "prove that models like this one convert: a tiny random one, there and back, in transformers and Megatron",
        "check-model Qwen3-4B",
        (
            _path("model", help="Hugging Face directory; its config.json is enough"),
            Flag("--no-megatron", dest="megatron", action="store_false", help="leave out the run in Megatron-core"),
            _JSON,
        ),
        _check_model,
        epilog="Needs transformers, and megatron-core for its proofs. Exit code: 0 if no proof failed, else 1.",
    ),
    Subcommand(
        "megatron-flags",
        "print the flags that give Megatron a model's shape",
        "megatron-flags Qwen3-4B",
        (_path("model", metavar="MODEL", help="Hugging Face directory, or a name that list-models prints"),),
        _megatron_flags,
    ),
    Subcommand(
        "list-models", "published models whose shape flags megatron-flags prints", "list-models", (), _list_models
    ),
)
