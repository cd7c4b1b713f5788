"""Tensors wait elsewhere and come back, with all views of them."""

from types import SimpleNamespace

import pytest
import torch

from slime_megatron.errors import TrainingError
from slime_megatron.weights.offload import OffloadStore, unique_storages

CPU, GPU = (SimpleNamespace(is_cpu=is_cpu) for is_cpu in (True, False))


@pytest.mark.parametrize("device", [CPU, GPU], ids=["in a file", "in host memory"])
def test_content_waits_and_comes_back_to_all_views(device, tmp_path):
    whole, other = torch.arange(1000.0), torch.full((7,), 3, dtype=torch.int16)
    view = whole[500:]
    store = OffloadStore(device, tmp_path)
    for _ in range(2):  # what it waits in is kept
        store.take([whole, view, other])
        assert store.nbytes == 4000 + 14
        assert (whole.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (0, 0)
        store.give_back()
        assert store.nbytes == 0
        assert whole.tolist() == list(range(1000)) and view[0] == 500 and other.tolist() == [3] * 7
        whole += 0  # it can be written again
    store.give_back()  # nothing waits
    assert not list(tmp_path.iterdir())  # the file has no name


def test_what_cannot_be_emptied_stays(tmp_path):
    of_numpy = torch.ones(4)
    of_numpy.numpy()
    store = OffloadStore(CPU, tmp_path)
    store.take([of_numpy])
    assert store.nbytes == 0 and of_numpy.tolist() == [1, 1, 1, 1]


def test_nothing_is_emptied_where_the_disk_has_no_room(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    tensor = torch.ones(4)
    with pytest.raises(TrainingError, match=r"no room in .* \(No space left on device\); make room there"):
        OffloadStore(CPU, tmp_path).take([tensor])
    assert tensor.tolist() == [1, 1, 1, 1]


def test_a_storage_counts_once():
    whole = torch.zeros(10)
    assert [storage.nbytes() for storage in unique_storages([whole, whole[2:], torch.zeros(0)])] == [40]
