"""The table of ``docs/reference/model-families.md``, from the package's tables and from what its tests prove.

``python -m support.families_page``, in ``tests``, writes it into the page; ``test_readme.py`` compares.
"""

from pathlib import Path

from slime_convert import ModelShape, WeightMap
from slime_convert.check.proofs import missing_in_megatron
from slime_convert.check.tiny import tiny_config
from slime_convert.conversions.quantized import projections
from slime_convert.errors import QuantizationError
from slime_convert.families import FAMILIES
from slime_convert.formats.gguf import _FAMILIES as IN_GGUF
from support.published_configs import CONFIGS

COMMAND = "cd packages/slime-convert/tests && python -m support.families_page"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
NOTES = "¹²³⁴⁵⁶⁷⁸⁹"
COLUMNS = (
    "`model_type`",
    "models",
    "Hugging Face → `torch_dist`",
    "`torch_dist` → Hugging Face",
    "GGUF →",
    "FP8, INT4 read",
    "MXFP4 read",
    "prediction module",
    "configs",
    "there and back",
    "transformers",
    "Megatron",
    "export",
)


def find_page(name):
    """A page of ``docs``, by its name there; ``None`` outside the workspace, where the pages are not."""
    return next((path for root in Path(__file__).parents if (path := root / "docs" / name).is_file()), None)


PAGE = find_page("reference/model-families.md")


def configs_of(family):
    """The configs of which ``tests/check`` proves every row of ``check-model``."""
    return [config for config in CONFIGS.values() if config["model_type"] == family]


def tiny_shape(config):
    return ModelShape.from_hf_config(tiny_config(config))


def is_quantizable(family):
    """Whether all its projections are matrices of their own, which FP8 and INT4 ask for."""
    weight_map = WeightMap(tiny_shape(configs_of(family)[0]))
    try:
        return bool(projections({name: weight_map.hf_shape(name) for name in weight_map.hf_names()}))
    except QuantizationError:
        return False


def has_experts_in_one_tensor(family):
    """Whether its experts are stored as those that MXFP4 is read of."""
    return any(part.stacked for rule in FAMILIES[family].layer for part in rule.hf)


def table():
    """The table and its notes, as Markdown."""
    notes, rows = [], []
    for name, family in FAMILIES.items():
        proven = configs_of(name)
        lacking = [lacks for config in proven if (lacks := missing_in_megatron(tiny_shape(config)))]
        marks = ""
        for lacks in dict.fromkeys(lacking):
            note = lacks if len(lacking) == len(proven) else f"{lacks} (of {len(lacking)} of the {len(proven)} configs)"
            if note not in notes:
                notes.append(note)
            marks += NOTES[notes.index(note)]
        both_ways = [bool(proven)] * 2
        reads = [name in IN_GGUF, is_quantizable(name), has_experts_in_one_tensor(name)]
        core = f"✓{marks}" if proven else False
        cells = map(_cell, [*both_ways, *reads, bool(family.mtp), str(len(proven)), *both_ways, core, core])
        rows.append((f"`{name}`", family.models, *cells))
    lines = [_line(COLUMNS), _line(["---"] * 2 + [":-:"] * (len(COLUMNS) - 2)), *map(_line, rows), ""]
    lacks = " ".join(f"{NOTES[number]} {note}." for number, note in enumerate(notes))
    return "\n".join([*lines, f"What Megatron-core 0.16.1 lacks: {lacks}", ""])


def _cell(value):
    return value if isinstance(value, str) else "✓" if value else "–"


def _line(cells):
    return f"| {' | '.join(cells)} |"


def with_table(text):
    """The page's text with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{behind}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
