"""Tensors that are read while they are to change are as they were."""

import threading

import pytest
import torch

from slime_megatron.checkpoints import background
from slime_megatron.checkpoints.background import LiveTensors


def test_they_are_read_in_place_until_they_are_to_change():
    first, second = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)
    live = LiveTensors([first, second])
    with live.reading(first) as tensor:
        assert tensor.data_ptr() == first.data_ptr()
    live.release()
    assert list(live._copies) == [second.untyped_storage()._cdata]  # nothing of what was read already
    second.zero_()
    second.untyped_storage().resize_(0)
    with live.reading(second) as tensor:
        assert tensor.tolist() == [1, 1, 1, 1]
    assert not live._copies


def test_views_of_one_storage():
    whole = torch.arange(12.0)
    parts = [whole[2:8].view(2, 3).t(), whole[8:], torch.tensor(3.0)]
    expected = [part.tolist() for part in parts]
    live = LiveTensors(parts)
    live.release()
    whole.zero_()
    parts[2].zero_()
    for part, values in zip(parts, expected, strict=True):
        with live.reading(part) as tensor:
            assert tensor.tolist() == values


def test_none_is_read_twice():
    tensor = torch.ones(2)
    live = LiveTensors([tensor])
    with live.reading(tensor):
        pass
    with pytest.raises(RuntimeError, match="second time"), live.reading(tensor):
        pass


def test_a_change_waits_for_the_tensor_that_is_read():
    tensors = [torch.ones(2), torch.ones(3)]
    live = LiveTensors(tensors)
    with live.reading(tensors[0]):
        thread = threading.Thread(target=live.release)
        thread.start()
        while not live._next.locked():
            thread.join(0.001)
        assert not live._is_released
    thread.join(60)
    assert live._is_released
    live.end()


def test_without_memory_a_change_waits_for_the_end(monkeypatch):
    monkeypatch.setattr(background, "spare_memory", lambda: 0)
    live = LiveTensors([torch.ones(2)])
    thread = threading.Thread(target=live.release)
    thread.start()
    assert thread.is_alive()
    live.end()
    thread.join(60)
    assert not thread.is_alive() and not live._is_released


@pytest.mark.parametrize("limit", ["max", str(3 * 2**30)])
def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch, limit):
    machine = background.spare_memory()
    assert machine > 2**29
    monkeypatch.setattr(background, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{2 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {2**20}\n")
    if limit == "max":
        assert background.spare_memory() > 2**29
    else:  # what its files take can be taken back, and the margin stays
        assert background.spare_memory() == 3 * 2**30 - 2 * 2**30 + 2**20 - background.MARGIN_BYTES
