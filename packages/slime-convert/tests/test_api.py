"""The names of ``slime_convert``: what they return and raise, and what they load."""

import inspect
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tqdm import tqdm

import slime_convert
from slime_convert import Converted, ConvertError, ProgressBar, ProgressLines, errors
from support.family_models import make_model, weights_of

HEAVY = ("torch", "numpy", "safetensors", "transformers", "megatron", "gguf", "tqdm")
CONVERSIONS = (
    "fp8_to_bf16",
    "gguf_to_hf",
    "hf_to_fp8",
    "hf_to_int4",
    "hf_to_torch_dist",
    "int4_to_bf16",
    "megatron_to_hf",
    "merge_lora",
    "torch_dist_to_hf",
)


def run(code, *words):
    """The lines that a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class TestNames:
    def test_all_of_them_are_there(self):
        assert slime_convert.__all__ == sorted(slime_convert.__all__, key=lambda name: (not name.isupper(), name))
        for name in slime_convert.__all__:
            found = getattr(slime_convert, name)
            assert found is not None and not isinstance(found, ModuleType)
            assert callable(found) or name == "SHAPE_FLAGS"

    def test_another_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match=r"module 'slime_convert' has no attribute 'hf_to_torch'"):
            _ = slime_convert.hf_to_torch
        assert not hasattr(slime_convert, "__wrapped__")

    def test_a_star_brings_them_all(self):
        space = {}
        exec("from slime_convert import *", space)
        assert set(slime_convert.__all__) <= space.keys()

    def test_whatever_is_imported_first(self):
        """Importing a module binds it as an attribute of the package, where a name of the same spelling would be."""
        code = """if True:
            import importlib, pkgutil, random, sys, types

            def forget():
                for name in [name for name in sys.modules if name.partition(".")[0] == "slime_convert"]:
                    del sys.modules[name]

            import slime_convert
            modules = [found.name for found in pkgutil.walk_packages(slime_convert.__path__, "slime_convert.")]
            # The others take torch, and seconds.
            modules = [name for name in modules if not name.startswith("slime_convert.check.")]
            modules.remove("slime_convert.quantize.numbers")
            modules.remove("slime_convert.__main__")
            for seed in range(8):
                forget()
                import slime_convert
                steps = [*modules, *slime_convert.__all__]
                random.Random(seed).shuffle(steps)
                for step in steps:
                    importlib.import_module(step) if step in modules else getattr(slime_convert, step)
                found = {name: getattr(slime_convert, name) for name in slime_convert.__all__}
                assert not [name for name, value in found.items() if isinstance(value, types.ModuleType)]
            print(len(modules) > 30)
        """
        assert run(code) == ["True"]

    def test_the_type_checker_is_told_the_same(self):
        """The imports for it, next to the table of modules that the interpreter goes by."""
        source = inspect.getsource(slime_convert)
        told = source.partition("if TYPE_CHECKING:\n")[2]
        space = {}
        exec("\n".join(line.strip() for line in told.partition("\nelse:")[0].splitlines()), space)
        assert {name for name in space if name != "__builtins__"} == set(slime_convert.__all__)
        assert all(space[name] is getattr(slime_convert, name) for name in slime_convert.__all__)


class TestWhatIsLoaded:
    """A second or more of imports, for which nobody should wait who wants a line of help."""

    def test_nothing_heavy_with_the_package(self):
        assert run(f"import sys, slime_convert; print({set(HEAVY)} & sys.modules.keys())") == ["set()"]
        # Names are loaded when they are asked for, and these need no tensors.
        code = f"""if True:
            import sys
            from slime_convert import *
            print({set(HEAVY)} & sys.modules.keys())
        """
        assert run(code) == ["set()"]

    @pytest.mark.parametrize(
        "words",
        [
            ["--help"],
            ["--version"],
            ["hf-to-torch-dist", "--help"],
            ["hf-to-torch-dist", "--help-shape"],
            ["list-models"],
            ["megatron-flags", "qwen3-4B"],
            ["hf-to-torch-dist", "--sav", "x"],
            ["inspect"],
        ],
        ids=" ".join,
    )
    def test_nothing_heavy_for_a_line_of_text(self, words):
        code = f"""if True:
            import sys
            from slime_convert.cli import main
            try:
                main(sys.argv[1:])
            except SystemExit:
                pass
            print({set(HEAVY)} & sys.modules.keys())
        """
        assert run(code, *words)[-1] == "set()"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of few weights. Not to be changed."""
    return make_model("llama-tied", tmp_path_factory.mktemp("small") / "hf", num_hidden_layers=1)


class TestResults:
    def test_place_and_numbers_are_those_of_the_output(self, small, tmp_path):
        there = slime_convert.hf_to_torch_dist(small, str(tmp_path / "td"))
        back = slime_convert.torch_dist_to_hf(str(tmp_path / "td"), str(tmp_path / "hf"), str(small))
        assert isinstance(there, Converted) and isinstance(back, Converted)
        weights = weights_of(tmp_path / "hf")
        assert (back.path, back.num_weights) == (tmp_path / "hf", len(weights))
        assert back.num_bytes == sum(tensor.nbytes for tensor in weights.values())
        held = slime_convert.inspect_checkpoint(tmp_path / "td").to_json()
        assert there.path == tmp_path / "td" and there.num_bytes == held["weights"]["bytes"]
        assert there.num_weights == held["weights"]["tensors"]
        assert (there.copied, there.notes, back.copied, back.notes) == ((), (), (), ())
        assert 0 < there.seconds < 60

    def test_every_conversion_says_what_it_returns(self):
        for name in CONVERSIONS:
            assert inspect.signature(getattr(slime_convert, name)).return_annotation == "Converted", name

    def test_a_progress_of_ones_own(self, small, tmp_path):
        calls = []
        slime_convert.hf_to_torch_dist(small, tmp_path / "td", on_progress=lambda *call: calls.append(call))
        (total,) = {total for _, total in calls}
        done = [done for done, _ in calls]
        assert done[0] == 0 and done == sorted(done) and done[-1] == total > 0

    def test_tqdms_bar(self, small, tmp_path):
        """In a notebook ``tqdm.auto`` is a widget."""
        text = io.StringIO()
        bar = ProgressBar(file=text, desc="there")
        slime_convert.hf_to_torch_dist(small, tmp_path / "td", on_progress=bar)
        last = text.getvalue().split("\r")[-1]
        assert last.startswith("there: 100%|") and isinstance(bar._bar, tqdm) and bar._bar.disable

    def test_lines_for_a_log(self, small, tmp_path, monkeypatch):
        monkeypatch.setattr("slime_convert.progress._LOG_PAUSE_SECONDS", 0.0)
        lines = []
        slime_convert.hf_to_torch_dist(small, tmp_path / "td", on_progress=ProgressLines(lines.append))
        assert len(lines) > 3 and all(" %, " in line for line in lines)

    def test_what_a_progress_raises_ends_the_conversion(self, small, tmp_path):
        """Such as a user's own stop; what is written stays, to be continued."""

        def stop(*_):
            raise KeyError("enough")

        with pytest.raises(KeyError, match="enough"):
            slime_convert.hf_to_torch_dist(small, tmp_path / "td", on_progress=stop)
        assert not (tmp_path / "td").exists()
        slime_convert.hf_to_torch_dist(small, tmp_path / "td")
        assert slime_convert.verify(small, tmp_path / "td").equal


class TestErrors:
    CLASSES = tuple(
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    )

    def test_one_base_for_all(self):
        assert len(self.CLASSES) > 10
        assert all(issubclass(kind, ConvertError) and kind.__doc__ for kind in self.CLASSES)
        assert all(kind.__name__.endswith("Error") for kind in self.CLASSES)
        assert ConvertError.__mro__[1] is Exception

    def test_each_is_raised_somewhere(self):
        """And none stands there for nothing."""
        package = Path(errors.__file__).parent
        sources = [path.read_text() for path in package.rglob("*.py") if path.name != "errors.py"]
        for kind in self.CLASSES:
            assert kind is ConvertError or any(kind.__name__ in source for source in sources), kind

    @pytest.mark.parametrize(
        ("call", "kind"),
        [
            (lambda at: slime_convert.hf_to_torch_dist(at / "none", at / "td"), errors.HfConfigError),
            (lambda at: slime_convert.torch_dist_to_hf(at / "none", at / "hf", at), errors.CheckpointError),
            (lambda at: slime_convert.megatron_to_hf(at / "none", at / "hf", at), errors.HfConfigError),
            (lambda at: slime_convert.gguf_to_hf(at / "none", at / "hf"), errors.CheckpointError),
            (lambda at: slime_convert.merge_lora(at / "none", at / "none", at / "hf"), errors.HfConfigError),
            (lambda at: slime_convert.hf_to_fp8(at / "none", at / "hf"), errors.HfConfigError),
            (lambda at: slime_convert.int4_to_bf16(at / "none", at / "hf"), errors.HfConfigError),
            (lambda at: slime_convert.verify(at / "none", at / "none"), errors.CheckpointError),
            (lambda at: slime_convert.inspect_checkpoint(at / "none"), errors.CheckpointError),
            (lambda at: slime_convert.check_model(at / "none"), errors.HfConfigError),
            (lambda at: slime_convert.ModelShape.from_hf_config(at), errors.HfConfigError),
        ],
    )
    def test_a_path_that_is_none(self, tmp_path, call, kind):
        with pytest.raises(kind, match=r"none|config\.json"):
            call(tmp_path)
        assert not any(tmp_path.iterdir())
