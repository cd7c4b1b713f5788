import subprocess
import sys
from pathlib import Path

import pytest

import slime_core


def run(code):
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return result.stdout.strip()


def test_the_package_loads_nothing():
    code = "import sys; before = set(sys.modules); import slime_core; print(sorted(set(sys.modules) - before))"
    loaded = run(code)
    assert "slime_core" in loaded and "slime_core." not in loaded and "torch" not in loaded


def test_every_name_and_the_flag_table_come_without_torch():
    code = """
import sys, slime_core
from slime_core import *
assert slime_core.Sample(index=0, group_index=0, prompt="p").to_dict()
assert any(spec.name == "--eps-clip" for spec in slime_core.flag_specs(slime_core.AlgorithmConfig))
print("torch" in sys.modules)
"""
    assert run(code) == "False"


def test_modules_load_when_they_are_asked_for():
    code = """
import sys, slime_core
before = "torch" in sys.modules
slime_core.ops.whiten
print(before, "torch" in sys.modules)
"""
    assert run(code) == "False True"


def test_all_names_are_there_and_are_the_same_objects_as_in_their_modules():
    assert slime_core.__all__ == sorted(slime_core.__all__)
    for name in slime_core.__all__:
        value = getattr(slime_core, name)
        module = getattr(value, "__module__", "")
        assert not module.startswith("slime_core") or getattr(sys.modules[module], name) is value
        assert vars(slime_core)[name] is value  # found at once from now on


def test_dir_lists_names_and_modules():
    files = {file.stem for file in Path(slime_core.__file__).parent.glob("*.py")} - {"__init__"}
    assert files | {"ops", "types"} | set(slime_core.__all__) <= set(dir(slime_core))


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'slime_core' has no attribute 'nothing'"):
        _ = slime_core.nothing
    assert not hasattr(slime_core, "__wrapped__")
