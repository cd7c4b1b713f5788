import importlib.metadata
import pkgutil
import subprocess
import sys

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
    """What torch itself imports, which depends on what is installed, is no concern of ours."""
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
