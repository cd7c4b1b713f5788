import subprocess
import sys

import pytest

TORCH_FREE = [
    "slime_core",
    "slime_core.balance",
    "slime_core.config",
    "slime_core.context_parallel",
    "slime_core.errors",
    "slime_core.flags",
    "slime_core.flops",
    "slime_core.hooks",
    "slime_core.interfaces",
    "slime_core.metrics",
    "slime_core.micro_batches",
    "slime_core.mis_config",
    "slime_core.packing",
    "slime_core.rewards",
    "slime_core.schedule",
    "slime_core.schedule_report",
    "slime_core.step_plan",
    "slime_core.types",
]


def modules_after(statement):
    command = f"{statement}; import sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
    return set(result.stdout.split())


def test_only_the_operations_import_torch():
    assert "torch" not in modules_after(f"import {', '.join(TORCH_FREE)}")


def test_nothing_but_torch_is_needed():
    loaded = modules_after("import slime_core.ops")
    assert "torch" in loaded
    assert not loaded & {"ray", "transformers", "megatron", "sglang", "aiohttp", "slime_rollout", "slime_megatron"}


def test_an_op_is_found_where_the_documentation_says():
    import slime_core.ops

    assert sorted(slime_core.ops.__all__) == slime_core.ops.__all__
    for name in slime_core.ops.__all__:
        assert callable(getattr(slime_core.ops, name))
    with pytest.raises(AttributeError):
        _ = slime_core.ops.nothing
