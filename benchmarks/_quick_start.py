"""The quick start's model and problems for benchmarks, and for quick ones a model of its first layers alone."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import subprocess
from pathlib import Path

from quickstart import BIN, MODEL_PACKAGE, ROOT, Stamp, get_model, write_data
from quickstart_parts import Places

SEED = 1
FEW_LAYERS = 4


def prepare(*, few_layers: bool = False) -> Places:
    """Make what is not there yet. Another benchmark that wants the same meanwhile waits.

    Args:
        few_layers: The model's first layers and nothing else of its depth: what it writes makes no sense, and it does
            so several times as fast. Its runs need :func:`depth` among their flags.
    """
    places = Places.under(ROOT / "outputs" / "quickstart", SEED)
    places.run.mkdir(parents=True, exist_ok=True)
    with (ROOT / "outputs" / "quickstart" / "benchmarks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        get_model(places)
        write_data(places, SEED)
        if few_layers:
            shallow = dataclasses.replace(places, model=places.model.with_name(f"model-{FEW_LAYERS}-layers"))
            _cut(places, shallow)
            places = shallow
    return places


def depth(places: Places) -> list[str]:
    """The flag that says how many layers the model has; it comes after those of `scripts/models`, and counts."""
    return ["--num-layers", str(_config(places.hf)["num_hidden_layers"])]


def _cut(whole: Places, shallow: Places) -> None:
    """Write the first layers of a model as one of its own, in both formats."""
    from safetensors.torch import load_file, save_file

    settings = {"package": MODEL_PACKAGE, "layers": FEW_LAYERS}
    stamp = Stamp(shallow.model / "done.json", settings, needs=(shallow.hf, shallow.torch_dist))
    if stamp.is_set():
        return
    shutil.rmtree(shallow.model, ignore_errors=True)
    weights = "model.safetensors"
    shutil.copytree(whole.hf, shallow.hf, ignore=shutil.ignore_patterns(weights))
    dropped = tuple(
        f"model.layers.{layer}." for layer in range(FEW_LAYERS, int(str(_config(whole.hf)["num_hidden_layers"])))
    )
    kept = {name: tensor for name, tensor in load_file(whole.hf / weights).items() if not name.startswith(dropped)}
    save_file(kept, shallow.hf / weights, metadata={"format": "pt"})
    config = _config(whole.hf) | {"num_hidden_layers": FEW_LAYERS}
    (shallow.hf / "config.json").write_text(json.dumps(config, indent=1))
    convert = [str(BIN / "slime-convert"), "hf-to-torch-dist", "--quiet", "--force"]
    subprocess.run([*convert, "--hf-checkpoint", str(shallow.hf), "--save", str(shallow.torch_dist)], check=True)
    stamp.set()


def _config(hf: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    return config
