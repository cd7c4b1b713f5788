"""Modules of features that an engine on a CPU does not have here. They are a quarter of what it imports.

They come in by a chain of imports; nothing of them is called. A module is left out only from the release that this was
tested with, and where it is there; else it is imported as it is. What is called after all says how to have it.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import types
from typing import NamedTuple

from slime_cpu_shims.structure import after


class Feature(NamedTuple):
    """A module that is left out, with all below it."""

    module: str
    release: tuple[str, str]  # package, and how the versions begin that this was tested with
    why: str  # what it is for, and why an engine here does without
    unless: str | None = None  # package that brings the feature: where it is installed, the module is imported as it is


FEATURES = (
    Feature("torch._dynamo", ("torch", "2.13."), "compiles functions, which TORCHDYNAMO_DISABLE=1 switches off"),
    Feature("torch._inductor", ("torch", "2.13."), "generates the code of compiled functions"),
    Feature("torch._meta_registrations", ("torch", "2.13."), "shapes of results without data, which compilers ask for"),
    Feature("torch.distributed.tensor", ("torch", "2.13."), "DTensor, which transformers' own models are sharded with"),
    Feature("transformers.generation.continuous_batching", ("transformers", "5.19."), "transformers' own server"),
    Feature("IPython", ("ipython", ""), "shows pictures and progress in a notebook"),
    Feature(
        "openai", ("openai", ""), "types of /v1/responses, which SGLang has only with openai-harmony", "openai_harmony"
    ),
)


class _Class(type):
    """A class that can be subclassed and made, that pydantic takes as a field's type, and that has nothing to call."""

    def __new__(mcs, name, bases, namespace, **_options):
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name, bases, namespace, **_options):
        super().__init__(name, bases, namespace)

    def __get_pydantic_core_schema__(cls, _source, _handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __getitem__(cls, _item):
        return cls


class LeftOut(types.ModuleType):
    """Has every name: in CamelCase an empty class, else a function that refuses to be called."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"

        def refuse(*_args, **_kwargs):
            raise NotImplementedError(
                f"{full_name} was called, but slime leaves it out of engines on a CPU; "
                "set SLIME_ENGINE_IMPORT_ALL=1 to have it"
            )

        value = refuse
        if name[0].isupper():
            value = _Class(name, (), {"__module__": self.__name__, "__init__": lambda *_args, **_kwargs: None})
        setattr(self, name, value)
        return value


def _as_it_is(function=None, *_args, **_kwargs):
    """A decorator, with arguments or without, that leaves a function as it is."""
    return _as_it_is if function is None else function


def _fill_dynamo(module):
    """The few things that are called while others are imported, or at the first call of some functions of torch."""
    for name in ("disable", "allow_in_graph", "assume_constant_result", "skip"):
        setattr(module, name, _as_it_is)
    for name in ("mark_static", "mark_dynamic", "maybe_mark_dynamic", "mark_unbacked", "reset", "graph_break"):
        setattr(module, name, lambda *_args, **_kwargs: None)
    module.is_compiling = lambda: False
    module.config = types.SimpleNamespace()
    # torch calls it whenever a process group is made.
    module.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return LeftOut(spec.name)

    def exec_module(self, module):
        if module.__name__ == "torch._dynamo":
            _fill_dynamo(module)


class LeaveOut(importlib.abc.MetaPathFinder):
    """Finds the modules of the features, and has ``torch.compile`` leave functions as they are."""

    def __init__(self):
        self._rows = {}

    def find_spec(self, name, path=None, target=None):
        """A module that is left out, or one of those below it."""
        if name == "torch":
            return after(name, None, self._leave_functions_as_they_are)
        for row in FEATURES:
            if name == row.module or name.startswith(f"{row.module}."):
                return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True) if self._applies(row) else None
        return None

    def _applies(self, row):
        if row.module not in self._rows:
            package, begin = row.release
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                tested = importlib.metadata.version(package).startswith(begin)
                self._rows[row.module] = tested and not (row.unless and importlib.util.find_spec(row.unless))
        return self._rows.get(row.module, False)

    def _leave_functions_as_they_are(self, torch):
        """`torch.compile` itself imports the compiler, even where TORCHDYNAMO_DISABLE=1 has it do nothing."""
        if self._applies(FEATURES[0]):
            torch.compile = lambda model=None, **_options: _as_it_is if model is None else model
