import functools
import gc
import multiprocessing
import textwrap
import time

import pytest

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_rollout.config import RolloutConfig
from slime_rollout.data import (
    CustomSource,
    PromptDataset,
    PromptRow,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    TokenizedPrompt,
    find_data_source,
    load_source,
    make_data_source,
)

BUFFERED = "slime_rollout.data.RolloutDataSourceWithBuffer"
CUSTOM = """class own:
    def get_samples(self, num_samples): return []
    def add_samples(self, groups): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
"""


@pytest.fixture
def config():
    return functools.partial(RolloutConfig.of, hf_checkpoint="m", prompt_data="p.jsonl", rollout_batch_size=2)


@pytest.fixture
def hook(tmp_path, request):
    """A file with the given definitions."""
    path = tmp_path / "hook.py"

    def write(text):
        path.write_text("from slime_rollout.data import *\n" + textwrap.dedent(text))
        return f"{path}:own"

    return write


@pytest.fixture
def dataset():
    return PromptDataset([TokenizedPrompt(row=PromptRow(where="", prompt="p", label="1"), tokens=[1])])


def test_the_plain_source_is_the_default(config, dataset):
    assert find_data_source(config()) is RolloutDataSource
    made = make_data_source(config(n_samples_per_prompt=3), dataset, HookArgs({"a": 1}))
    assert (type(made), made.args.a, len(made.get_samples(1)[0])) == (RolloutDataSource, 1, 3)


def test_the_buffer_and_its_filter(config, dataset, hook):
    path = hook("def own(args, buffer, num_samples): return buffer[-num_samples:]")
    made = make_data_source(config(data_source_path=BUFFERED, buffer_filter_path=path), dataset, HookArgs({}))
    assert type(made) is RolloutDataSourceWithBuffer
    made.add_samples(made.get_samples(3))
    assert [group[0].group_index for group in made.get_samples(1)] == [2]


def test_a_filter_in_the_form_of_upstream(config, dataset, hook):
    path = hook("def own(args, rollout_id, buffer, num_samples): return [buffer.pop()] if rollout_id is None else []")
    made = make_data_source(config(data_source_path=BUFFERED, buffer_filter_path=path), dataset, HookArgs({}))
    made.add_samples(made.get_samples(3))
    assert [group[0].group_index for group in made.get_samples(1)] == [2]


@pytest.mark.parametrize("arguments", ["self, args", "self, dataset, samples_per_prompt, shuffle, seed, args"])
def test_a_class_that_derives_from_nothing_of_ours_is_made_with_the_prompts_or_with_the_flags(
    config, dataset, hook, arguments
):
    path = hook(f"{CUSTOM}    def __init__({arguments}): self.a = args.a")
    made = make_data_source(config(data_source_path=path), dataset, HookArgs({"a": 1}))
    assert type(made) is CustomSource and made.source.a == 1


def test_an_own_class_overrides_the_filter_as_a_method(config, dataset, hook):
    path = hook(
        """
        class own(RolloutDataSourceWithBuffer):
            def buffer_filter(self, args, buffer, num_samples):
                return buffer[-num_samples:]
        """
    )
    made = make_data_source(config(data_source_path=path), dataset, HookArgs({}))
    made.add_samples(made.get_samples(3))
    assert [group[0].group_index for group in made.get_samples(1)] == [2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def own(args): pass", "not a class with get_samples, .* derive it from slime_rollout.data.RolloutDataSource"),
        ("class own: pass", "not a class with get_samples, add_samples, state_dict, load_state_dict; write"),
        (f"{CUSTOM}    load_state_dict = None", "not a class with load_state_dict; write one"),
        (f"{CUSTOM}    def __init__(self, a, b): pass", r"the class takes \(a, b\); it is called with \(dataset, "),
        (
            "class own(RolloutDataSource):\n def __init__(self): self.buffer = []",
            r"the class takes \(\); it is called with \(dataset, samples_per_prompt=…, .*args=…\)",
        ),
        (
            "class own(RolloutDataSourceWithBuffer):\n def buffer_filter(self, buffer): return buffer",
            r"buffer_filter takes \(self, buffer\); it is called with \(self, args, buffer, num_samples\)",
        ),
        (
            "class own(RolloutDataSourceWithBuffer):\n async def buffer_filter(self, args, buffer, n): return buffer",
            "buffer_filter is async",
        ),
        ("class own(RolloutDataSource):\n def get_samples(self): pass", r"get_samples takes \(self\)"),
        ("class own(RolloutDataSource):\n def add_samples(self): pass", r"add_samples takes \(self\)"),
    ],
)
def test_a_class_that_cannot_be_used_is_told_at_launch(config, hook, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        find_data_source(config(data_source_path=hook(text)))
    assert str(caught.value).startswith("--data-source-path ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("own = 3", "has no function own"),
        ("def own(buffer): pass", r"takes \(buffer\); it is called with 3 arguments, \(args, buffer, num_samples\)"),
        ("async def own(args, buffer, num_samples): pass", "is async"),
    ],
)
def test_a_filter_that_cannot_be_used_is_told_at_launch(config, hook, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        find_data_source(config(data_source_path=BUFFERED, buffer_filter_path=hook(text)))
    assert str(caught.value).startswith("--buffer-filter-path ")


def test_a_filter_without_a_buffer_is_told(config, hook):
    path = hook("def own(args, buffer, num_samples): return buffer")
    with pytest.raises(ConfigError, match=r"RolloutDataSource has no buffer .* give --data-source-path slime_rollout"):
        find_data_source(config(buffer_filter_path=path))


ROWS = [{"prompt": f"{place} + 1 =", "label": str(place + 1)} for place in range(12)]


@pytest.fixture
def load(config_of, encoder, write, tmp_path):
    """Loads a file of prompts."""

    def build(rows=ROWS, **changes):
        write(rows, tmp_path / "p.jsonl")
        config = config_of(prompt_data=str(tmp_path / "p.jsonl"), **changes)
        return load_source(config, encoder, HookArgs({"a": 1}))

    return build


@pytest.fixture
def children():
    """Processes that the test started and that run."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def drawn(source):
    return [group[0].to_dict() for group in source.get_samples(30)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_flags_change_how_and_not_what(load, children, streaming, workers):
    source = load(streaming_data=streaming, num_data_workers=workers, rollout_shuffle=True)
    plain = load(rollout_shuffle=True)
    assert type(source) is RolloutDataSource
    assert source.args.a == 1
    assert drawn(source) == drawn(plain)
    assert len(children()) == (workers if streaming else 0)
    del source
    gc.collect()
    end = time.monotonic() + 60
    while children():  # child.join() may return early: the executor's own thread waits for the same process
        assert time.monotonic() < end
        time.sleep(0.01)


def test_own_sources_take_a_stream(load):
    source = load(streaming_data=True, data_source_path=BUFFERED)
    assert type(source) is RolloutDataSourceWithBuffer
    groups = source.get_samples(3)
    source.add_samples(groups[1:])
    assert [group[0].group_index for group in source.get_samples(4)] == [1, 2, 3, 4]


@pytest.mark.timeout(120)
def test_an_error_leaves_no_process(load, children):
    with pytest.raises(DataError, match=r"p\.jsonl:13: no field"):
        load([*ROWS, {}], num_data_workers=1)
    assert not children()


def test_a_row_of_a_stream_is_looked_at_when_its_turn_comes(load):
    source = load([*ROWS, {}], streaming_data=True)
    source.get_samples(12)
    with pytest.raises(DataError, match=r"p\.jsonl:13: no field"):
        source.get_samples(1)
