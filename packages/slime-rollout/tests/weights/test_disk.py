"""Whole checkpoints and deltas through files, with engines that only listen; the format of deltas."""

import base64
import dataclasses
import pickle
import shutil

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DamagedError, DataError, FormatVersionError
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.weights import DeltaWeightChannel, DiskWeightChannel
from slime_rollout.weights.disk import apply_delta, encode_delta, read_index
from support.random_tensors import DTYPES, LAYOUTS, SHAPES, bits, random_tensor, relaid


@pytest.fixture
def channel(engines, tmp_path, hf_checkpoint):
    urls = tuple(engine.url for engine in engines)
    return DiskWeightChannel(
        ChannelSpec(
            urls,
            hf_checkpoint=str(hf_checkpoint),
            sync=WeightSyncConfig(update_weight_disk_dir=str(tmp_path / "shared")),
        )
    )


def push(channel, weights, version):
    channel.begin(WeightUpdate(version=version))
    channel.send(list(weights.items())[:3])
    channel.send(list(weights.items())[3:])
    return channel.end()


def versions(tmp_path):
    return sorted(path.name for path in (tmp_path / "shared").glob("*weight_v*"))


def test_the_version_before_is_removed_once_the_next_is_confirmed(channel, engines, tmp_path, first):
    push(channel, first, 1)
    push(channel, first, 2)
    assert versions(tmp_path) == ["weight_v000002"]
    loads = [body["model_path"] for path, body in engines[0].asked if path == "/update_weights_from_disk"]
    assert loads == [str(tmp_path / "shared" / name) for name in ("weight_v000001", "weight_v000002")]
    sync = dataclasses.replace(channel.spec.sync, update_weight_disk_keep_files=True)
    push(DiskWeightChannel(dataclasses.replace(channel.spec, sync=sync)), first, 3)
    assert versions(tmp_path) == ["weight_v000002", "weight_v000003"]


def test_what_an_earlier_process_left_is_removed(channel, tmp_path, first):
    push(channel, first, 7)
    again = pickle.loads(pickle.dumps(channel))
    (tmp_path / "shared" / "weight_v000006").mkdir()  # nothing that was written by a channel
    push(again, first, 8)
    assert versions(tmp_path) == ["weight_v000006", "weight_v000008"]


def test_the_checkpoint_that_the_run_began_with_is_kept_wherever_it_is(channel, tmp_path, first):
    push(channel, first, 7)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    began = dataclasses.replace(channel.spec, hf_checkpoint=str(tmp_path / "link" / "weight_v000007"))
    again = DiskWeightChannel(pickle.loads(pickle.dumps(began)))
    push(again, first, 8)
    push(again, first, 9)
    assert versions(tmp_path) == ["weight_v000007", "weight_v000009"]


def test_whole_tensors_are_counted_as_they_are_written(channel, first):
    channel.begin(WeightUpdate(version=1))
    assert channel.send(list(first.items())) == sum(tensor.nbytes for tensor in first.values())


def test_engines_pause_only_to_load(channel, engines, first):
    channel.begin(WeightUpdate(version=1))
    channel.send(list(first.items()))
    assert not engines[0].asked
    channel.end()
    assert engines[0].paths()[:3] == ["/pause_generation", "/update_weight_version", "/update_weights_from_disk"]


def test_an_error_before_engines_load_leaves_them_as_they_are(channel, engines, tmp_path, first):
    push(channel, first, 1)
    channel.begin(WeightUpdate(version=2))
    with pytest.raises(DataError, match="has shape"):
        channel.send([("model.norm.weight", torch.ones(9))])
    channel.begin(WeightUpdate(version=3))
    with pytest.raises(WeightSyncError, match="weight version 3: no tensor was sent"):
        channel.end()
    assert [engine.version for engine in engines] == ["1", "1"]
    assert versions(tmp_path) == ["weight_v000001"]


def test_a_directory_that_cannot_be_written_is_one_error(channel, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(WeightSyncError, match=r"weight version 1: .*File exists: .*shared"):
        channel.begin(WeightUpdate(version=1))


def test_a_version_that_an_engine_refuses_is_removed_and_the_one_before_stays(channel, engines, tmp_path, first):
    push(channel, first, 1)
    engines[1].refuse["/update_weights_from_disk"] = "cannot load"
    with pytest.raises(WeightSyncError, match="cannot load") as caught:
        push(channel, first, 2)
    assert caught.value.url == engines[1].url
    assert versions(tmp_path) == ["weight_v000001"]
    assert [engine.version for engine in engines] == ["incomplete", "incomplete"]


@pytest.fixture
def publish(tmp_path, hf_checkpoint, first, step):
    """Publish two versions, for nobody; returns where."""
    directory = tmp_path / "deltas"
    channel = DeltaWeightChannel(
        ChannelSpec(
            (),
            hf_checkpoint=str(hf_checkpoint),
            sync=WeightSyncConfig(update_weight_disk_dir=str(directory), update_weight_disk_keep_files=True),
        )
    )
    for version in (1, 2):
        channel.begin(WeightUpdate(version=version))
        channel.send(list(step(first, version).items()))
        channel.end()
    return directory


def test_what_is_sent_of_a_delta_is_its_size_alone(tmp_path, hf_checkpoint, first, step):
    channel = DeltaWeightChannel(
        ChannelSpec(
            (), hf_checkpoint=str(hf_checkpoint), sync=WeightSyncConfig(update_weight_disk_dir=str(tmp_path / "deltas"))
        )
    )
    changed = step(first, 1)
    for version, weights in ((1, changed), (2, changed)):
        channel.begin(WeightUpdate(version=version))
        sent = sum(channel.send([item]) for item in weights.items())
        channel.end()
        assert sent == (tmp_path / "deltas" / f"weight_v{version:06d}" / "deltas.bin").stat().st_size
    assert sent < sum(tensor.nbytes for tensor in changed.values()) / 2  # nothing had changed


def test_deltas_of_an_older_format_are_refused_in_one_line_and_removed(publish, hf_checkpoint, first, step):
    (publish / "weight_v000001" / "index.json").rename(publish / "weight_v000001" / "index.slwi")
    message = r"weight_v000001.index.slwi has format version 1, and this slime reads 2; write it again with this one"
    with pytest.raises(FormatVersionError, match=message):
        read_index(publish, 1)
    channel = DeltaWeightChannel(
        ChannelSpec((), hf_checkpoint=str(hf_checkpoint), sync=WeightSyncConfig(update_weight_disk_dir=str(publish)))
    )
    channel.begin(WeightUpdate(version=5))
    channel.send(list(step(first, 5).items()))
    channel.end()
    assert [path.name for path in publish.iterdir()] == ["weight_v000005"]


def test_deltas_of_a_newer_format_are_refused_in_one_line(publish):
    path = publish / "weight_v000002" / "index.json"
    content = path.read_bytes().partition(b"\n")[2].replace(b'"format_version":2', b'"format_version":3')
    path.write_bytes(xxhash.xxh3_128_hexdigest(content).encode() + b"\n" + content)
    with pytest.raises(FormatVersionError, match=r"index.json has format version 3, and this slime reads 2"):
        read_index(publish, 2)


def test_an_index_of_another_version_is_refused(publish):
    shutil.copyfile(publish / "weight_v000001" / "index.json", publish / "weight_v000002" / "index.json")
    with pytest.raises(DamagedError, match="is the index of version 1; publish version 2 again"):
        read_index(publish, 2)


def changed(base, share, seed, step=None):
    """A contiguous tensor with about that share of its bytes changed."""
    generator = torch.Generator().manual_seed(seed)
    raw = base.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    places = torch.rand(raw.shape, generator=generator) < share
    if base.dtype == torch.bool:
        raw ^= places.to(torch.uint8)
    else:
        new = torch.randint(256, raw.shape, dtype=torch.uint8, generator=generator) if step is None else raw + step
        raw[places] = new[places]
    return raw.view(base.dtype).view(base.shape)


@st.composite
def two_versions(draw):
    dtype, shape, seed = draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.integers(0, 2**32))
    base = random_tensor(dtype, shape, seed)
    new = changed(base, draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0])), seed + 1)
    layouts = st.sampled_from(LAYOUTS)
    return relaid(base, draw(layouts)), relaid(new, draw(layouts))


@given(two_versions())
def test_a_delta_gives_the_new_version_to_the_bit(two_versions):
    base, new = two_versions
    before = bits(base)
    result = apply_delta(base, encode_delta(base, new))
    assert (result.dtype, result.shape) == (new.dtype, new.shape)
    assert bits(result) == bits(new) and bits(base) == before


# 2^20 elements are encoded at a time. Shares that lead to each way of writing places, and to two ways in one tensor.
@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-4, 2e-3, 0.05, 0.3, 0.95, 1.0])
def test_large_tensors_of_every_density(share):
    base = random_tensor(torch.bfloat16, (2**20 + 12_345,), 0)
    new = changed(base, share, 1, step=1)
    assert torch.equal(apply_delta(base, encode_delta(base, new)).view(torch.int16), new.view(torch.int16))


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 510, 65_534, 65_535, 65_536, 200_000])
def test_gaps_of_all_sizes(gap):
    base = torch.zeros(10 * gap + 3, dtype=torch.uint8)
    new = base.clone()
    new[gap::gap] = 7
    assert torch.equal(apply_delta(base, encode_delta(base, new)), new)
    new[: gap // 2 + 1] = 1  # then each element has a difference, in the first stretch
    assert torch.equal(apply_delta(base, encode_delta(base, new)), new)


def test_a_sparse_step_in_bf16_takes_a_byte_for_each_change():
    base = (torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    neighbour = torch.rand(base.shape, generator=torch.Generator().manual_seed(1)) < 0.03
    new = (base.view(torch.int16) + neighbour.to(torch.int16)).view(torch.bfloat16)
    assert len(encode_delta(base, new)) < 1.05 * int(neighbour.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_delta_is_never_much_larger_than_the_tensor(dtype):
    base, new = random_tensor(dtype, (100_000,), 0), random_tensor(dtype, (100_000,), 1)
    assert len(encode_delta(base, new)) < base.numel() * dtype.itemsize + 400


def test_nothing_changed_takes_next_to_nothing():
    base = torch.randn(3 * 2**20)
    assert len(encode_delta(base, base.clone())) < 300
    assert len(encode_delta(torch.empty(0), torch.empty(0))) < 300


def test_nan_and_negative_zero_are_bits_like_any_other():
    base = torch.tensor([float("nan"), 0.0, 1.0])
    new = torch.tensor([float("nan"), -0.0, 1.0])
    new.view(torch.int32)[0] += 3  # another NaN
    assert bits(apply_delta(base, encode_delta(base, new))) == bits(new)


def test_tensors_that_do_not_match_are_refused():
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(DataError, match=r"two versions of one tensor, got float32 \[2\] and float"):
            encode_delta(torch.zeros(2), other)


WRITTEN_BY_FORMAT_2 = "kZLEDSi1L/0gBCEAAAgAAADECyi1L/0gAhEAAPsB"


def test_deltas_of_this_format_stay_readable():
    result = apply_delta(torch.arange(60, dtype=torch.int16), base64.b64decode(WRITTEN_BY_FORMAT_2))
    assert result.tolist() == [*range(7), 258, *range(8, 60)]
