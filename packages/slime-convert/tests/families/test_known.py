"""Every family is listed once, by the file that has it."""

from importlib import import_module
from pathlib import Path

from slime_convert import families
from slime_convert.families import FAMILIES
from slime_convert.families.family import Family

FILES = sorted(path.stem for path in Path(families.__file__).parent.glob("[a-z]*.py"))


def test_what_files_list_is_what_is_known():
    lineages = [import_module(f"slime_convert.families.{name}") for name in FILES if name not in ("family", "known")]
    listed = [family for module in lineages for family in getattr(module, "FAMILIES", ())]
    written = [value for module in lineages for value in vars(module).values() if isinstance(value, Family)]
    assert len(listed) == len(written) == len(FAMILIES) and {*map(id, listed)} == {*map(id, written)}
    assert {name: FAMILIES[name] for name in sorted(FAMILIES)} == {one.model_type: one for one in listed}


def test_messages_name_them_in_the_order_of_the_readme():
    assert list(FAMILIES)[:4] == ["llama", "mistral", "mixtral", "qwen2"] and list(FAMILIES)[-1] == "gemma3_text"
