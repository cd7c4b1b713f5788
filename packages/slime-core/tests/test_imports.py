import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import slime_core

WITH_TORCH = ("slime_core.ops",)
MODULES = [module.name for module in pkgutil.walk_packages(slime_core.__path__, "slime_core.")]
WITHOUT_TORCH = [name for name in MODULES if not name.startswith(WITH_TORCH)]


def modules_after(statement):
    command = f"{statement}; import sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    return set(result.stdout.split())


def test_the_list_of_modules_is_one():
    assert {"slime_core.types.arrays", "slime_core.schedule"} <= set(WITHOUT_TORCH)
    assert {"slime_core.ops.losses"} <= set(MODULES) - set(WITHOUT_TORCH)


def test_only_the_operations_import_torch():
    loaded = modules_after(f"import {', '.join(WITHOUT_TORCH)}")
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"slime_core", "numpy"}
    startup = {name.partition(".")[0] for name in modules_after("pass")}
    assert foreign - startup == set()


def test_nothing_but_torch_and_numpy_is_imported():
    """What torch itself imports, which depends on what is installed, does not matter here."""
    torch = "import torch, torch.distributed, torch.utils.checkpoint"
    ours = modules_after(f"{torch}; import {', '.join(MODULES)}") - modules_after(torch)
    assert {name.partition(".")[0] for name in ours} - set(sys.stdlib_module_names) <= {"slime_core", "torch", "numpy"}


def test_nothing_but_torch_and_numpy_is_required():
    required = [line for line in importlib.metadata.requires("slime-core") or [] if "extra ==" not in line]
    assert {line.partition(">")[0] for line in required} == {"torch", "numpy"}


def test_an_op_is_found_where_the_documentation_says():
    import slime_core.ops

    assert sorted(slime_core.ops.__all__) == slime_core.ops.__all__
    for name in slime_core.ops.__all__:
        assert callable(getattr(slime_core.ops, name))
    with pytest.raises(AttributeError):
        _ = slime_core.ops.nothing


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


def test_a_sample_and_settings_come_without_numpy():
    loaded = modules_after("import slime_core; slime_core.Sample; slime_core.AlgorithmConfig; slime_core.HookArgs")
    assert "numpy" not in loaded
    assert "numpy" in modules_after("import slime_core; slime_core.RolloutColumns")


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
