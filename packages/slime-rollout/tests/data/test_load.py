import gc
import multiprocessing

import pytest

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_rollout.data import RolloutDataSource, RolloutDataSourceWithBuffer, load_source

ROWS = [{"prompt": f"{place} + 1 =", "label": str(place + 1)} for place in range(12)]
BUFFERED = "slime_rollout.data.RolloutDataSourceWithBuffer"


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
    left = children()
    del source
    gc.collect()
    for child in left:
        child.join(60)
    assert not children()


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
