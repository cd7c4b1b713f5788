"""Names of earlier versions work and warn."""

import importlib
import sys
import warnings

import pytest

from slime_convert.former_names import MOVED, RENAMED

NAMES = {
    "quantize": ("PACKED", "expand", "need_whole_groups", "settings_of"),
    "convert": ("hf_to_torch_dist", "torch_dist_to_hf", "megatron_to_hf", "check_args", "without_missing_modules"),
    "gguf": ("gguf_to_hf",),
    "lora": ("merge_lora", "merged"),
    "quantize.convert": ("hf_to_fp8", "hf_to_int4", "fp8_to_bf16", "int4_to_bf16", "projections", "K2_IGNORE"),
}


@pytest.mark.parametrize(("old", "name"), [(module, name) for module in MOVED for name in NAMES[module]])
def test_a_name_of_a_former_module_is_the_same_one_and_says_where_it_is(old, name):
    module = importlib.import_module(f"slime_convert.{old}")
    with pytest.warns(DeprecationWarning, match=rf"slime_convert\.{old}\.{name} is now .*; .* next release") as said:
        found = getattr(module, name)
    assert said[0].filename == __file__
    home, _, now = str(said[0].message).split("; ")[0].split(" is now ")[1].rpartition(".")
    assert found is getattr(importlib.import_module(home), now)


def test_a_former_module_is_imported_as_ever():
    with pytest.warns(DeprecationWarning, match=r"slime_convert\.lora\.merge_lora is now \S+\.conversions\.") as said:
        from slime_convert.lora import merge_lora
    import slime_convert
    from slime_convert import gguf

    assert said[0].filename == __file__
    assert merge_lora is slime_convert.merge_lora
    assert gguf is sys.modules["slime_convert.gguf"]


@pytest.mark.parametrize(("module", "old", "now"), [(m, *names) for m, row in RENAMED.items() for names in row.items()])
def test_a_class_under_its_former_name_is_the_same_one(module, old, now):
    home = importlib.import_module(f"slime_convert.{module}")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is now slime_convert\.{module}\.{now}; .*") as said:
        assert getattr(home, old) is getattr(home, now)
    assert said[0].filename == __file__


def test_nothing_else_is_found_and_nothing_else_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("slime_convert.nothing", "slime_convert.quantize.nothing"):
            with pytest.raises(ModuleNotFoundError, match=rf"No module named '{name}'"):
                importlib.import_module(name)
        for module in (*MOVED, *RENAMED):
            for name in ("Nothing", "__path__", "_load"):
                found = importlib.import_module(f"slime_convert.{module}")
                assert name in vars(found) or not hasattr(found, name)
