import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.words import counted
from slime_megatron.service import FUNCTIONS, given_functions
from slime_rollout.config import RolloutConfig
from slime_rollout.hooks import HOOKS

SCRIPT = Path(__file__).parents[3] / "scripts" / "hooks_page.py"
if not SCRIPT.is_file():
    pytest.skip("outside the repository", allow_module_level=True)
spec = importlib.util.spec_from_file_location("hooks_page", SCRIPT)
hooks_page = importlib.util.module_from_spec(spec)
sys.modules["hooks_page"] = hooks_page
spec.loader.exec_module(hooks_page)
FORMS = [(row, form) for row in hooks_page.rows() for form in (row.takes, *row.also)]


def test_the_page_of_hooks_is_up_to_date():
    assert hooks_page.PAGE.read_text(encoding="utf-8") == hooks_page.page(), "run: python scripts/hooks_page.py"


def _write(path, row, form):
    if row.kind == "class":
        names = {"get_samples": "n", "add_samples": "groups", "state_dict": "", "load_state_dict": "state"}
        methods = [f"    def {name}(self, {argument}): ...\n" for name, argument in names.items()]
        text = f"class own:\n    def __init__(self, {form[1:-1]}): ...\n{''.join(methods)}"
    else:
        text = f"{'async ' * (row.kind == 'async')}def own{form}: ...\n"
    path.write_text(text, encoding="utf-8")
    return f"{path}:own"


CALLED_BY_NAMES = ("data_source_path", "custom_generate_function_path", "rollout_sample_hook_path")
CALLED_BY_NAMES += ("rollout_function_path", "eval_function_path")
"""Hooks with arguments by name, which an error spells without their number."""


def _load(field, path):
    if field in FUNCTIONS:
        return given_functions(SimpleNamespace(**{field: path}))[field]()
    (hook,) = (hook for hook in HOOKS if hook.field == field)
    flags = {field: (path,) if field == "rollout_sample_hook_path" else path}
    if field == "buffer_filter_path":
        flags["data_source_path"] = "slime_rollout.data.RolloutDataSourceWithBuffer"
    held_out = {"eval_prompt_data": ("held", "q")}  # which some of them need
    config = RolloutConfig.of(hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, **held_out, **flags)
    return hook.load(config, HookArgs({}))


@pytest.mark.parametrize(("row", "form"), FORMS, ids=[f"{row.field}{form}" for row, form in FORMS])
def test_a_function_with_the_arguments_of_the_page_is_accepted(row, form, tmp_path):
    _load(row.field, _write(tmp_path / "own.py", row, form))


@pytest.mark.parametrize("row", hooks_page.rows(), ids=lambda row: row.field)
def test_a_function_with_other_arguments_is_refused(row, tmp_path):
    if row.field in FUNCTIONS and FUNCTIONS[row.field] is None:
        pytest.skip("called by name; its arguments are not checked in advance")
    with pytest.raises(ConfigError, match="own") as caught:
        _load(row.field, _write(tmp_path / "own.py", row, "(one, two, three, four, five, six, seven)"))
    if row.field not in CALLED_BY_NAMES:
        count = len(row.takes.split(", "))
        assert f"it is called with {counted(count, 'argument')}, {row.takes}" in str(caught.value)
