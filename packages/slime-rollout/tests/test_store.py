import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import RolloutBatch, Sample, Status
from slime_rollout.store import RolloutStore


def batch(rollout_id=12, groups=2, text="42"):
    return RolloutBatch(
        rollout_id=rollout_id,
        groups=[
            [
                Sample(
                    index=2 * group + place,
                    group_index=group,
                    prompt="12 + 30 =",
                    tokens=[1, 2, 3],
                    response=text,
                    response_length=1,
                    rollout_log_probs=[-0.1 - 1e-17],
                    weight_versions=[rollout_id],
                    reward=1.0,
                    status=Status.COMPLETED,
                )
                for place in range(2)
            ]
            for group in range(groups)
        ],
        weight_version=12,
        metrics={"raw_reward": 1.0},
        seconds={"generate": 0.1},
    )


def test_what_is_written_is_read(tmp_path):
    store = RolloutStore(tmp_path / "new" / "rollouts")
    assert store.ids() == []
    assert store.write(batch().columns()).name == "rollout_0000012.npz"
    store.write(batch(3).columns())
    store.write(batch(12_345_678).columns())
    assert store.ids() == [3, 12, 12_345_678]
    assert store.read(12).batch() == batch(12)
    assert sorted(path.name for path in (tmp_path / "new" / "rollouts").iterdir()) == [
        "rollout_0000003.npz",
        "rollout_0000012.npz",
        "rollout_12345678.npz",
    ]


@settings(deadline=None, max_examples=30)
@given(text=st.text(), value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_and_number_survives(tmp_path_factory, text, value):
    store = RolloutStore(tmp_path_factory.mktemp("store"))
    written = batch(text=text)
    written.groups[0][0].rollout_log_probs = [value]
    store.write(written.columns())
    assert store.read(12).batch() == written


def test_a_second_write_replaces_the_first(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(batch(text="old").columns())
    store.write(batch(text="new").columns())
    assert store.read(12).batch().samples[0].response == "new"


def test_discard_through(tmp_path):
    store = RolloutStore(tmp_path)
    for number in range(5):
        store.write(batch(number).columns())
    (tmp_path / "notes.txt").write_text("mine")
    store.discard_through(2)
    assert store.ids() == [3, 4]
    assert (tmp_path / "notes.txt").exists()


def test_a_missing_rollout(tmp_path):
    store = RolloutStore(tmp_path)
    for number in (0, 1, 2, 5):
        store.write(batch(number).columns())
    with pytest.raises(DataError, match="has no rollout 4; it has 0–2, 5"):
        store.read(4)


def test_a_file_torn_anywhere_is_reported(tmp_path):
    store = RolloutStore(tmp_path)
    path = store.write(batch().columns())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="is torn or not a rollout") as caught:
            store.read(12)
        assert str(path) in str(caught.value)
        assert "delete it, and that rollout is generated again" in str(caught.value)


def test_a_file_of_another_number_or_kind(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(batch(3).columns()).rename(store.path(4))
    with pytest.raises(DataError, match="holds rollout 3"):
        store.read(4)
    store.path(5).write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="torn or not a rollout"):
        store.read(5)
    store.path(6).write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="torn or not a rollout"):
        store.read(6)


def test_a_file_of_an_older_slime_is_refused(tmp_path):
    store = RolloutStore(tmp_path)
    (tmp_path / "rollout_0000003.jsonl").write_text('{"format_version": 1, "rollout_id": 3}\n')
    for call in (store.has, store.read):
        with pytest.raises(
            DataError, match=r"rollout_0000003\.jsonl was written by an older slime, .*; delete it, and"
        ):
            call(3)
    store.write(batch(3).columns())
    assert store.has(3) and not store.has(4)


WRITER = """
import sys
sys.path.insert(0, {here!r})
from test_store import batch
from slime_rollout.store import RolloutStore
store = RolloutStore({directory!r})
whole = [batch(number, groups=300).columns() for number in range(2)]
print("ready", flush=True)
while True:
    for one in whole:
        store.write(one)
        print("wrote", flush=True)
"""


PARTIAL = ".rollout_*.partial"


def kill_amid_a_write(code, directory):
    """Start the writer, let it finish a file, and kill it as soon as it is seen writing another."""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(3):
            assert writer.stdout.readline()
        deadline = time.monotonic() + 20
        while not any(directory.glob(PARTIAL)):
            assert time.monotonic() < deadline
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(20)
        writer.stdout.close()


def test_a_writer_killed_amid_a_write_leaves_whole_files(tmp_path):
    code = WRITER.format(here=str(Path(__file__).parent), directory=str(tmp_path))
    store = RolloutStore(tmp_path)
    whole = [batch(number, groups=300) for number in (0, 1)]
    hits = 0
    for _ in range(20):
        kill_amid_a_write(code, tmp_path)
        assert store.ids() == [0, 1]
        assert [store.read(number).batch() for number in (0, 1)] == whole
        hits += any(tmp_path.glob(PARTIAL))
        if hits == 3:
            return
    pytest.fail(f"only {hits} of 20 kills fell into a write")


def test_what_a_killed_writer_left_is_overwritten(tmp_path):
    store = RolloutStore(tmp_path)
    (tmp_path / ".rollout_0000012.npz.0123456789abcdef.partial").write_text("half a rol")
    assert store.ids() == []
    store.write(batch().columns())
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_0000012.npz"]


def test_the_state_of_the_data_lies_beside_its_rollout(tmp_path):
    store = RolloutStore(tmp_path)
    for number in range(3):
        store.write(batch(number).columns(), {"position": number, "score": float("inf")})
    assert store.read_source_state(2) == {"position": 2, "score": float("inf")}
    store.discard_through(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout_0000002.npz", "source_0000002.json"]
    (tmp_path / "source_0000002.json").write_text("{")
    with pytest.raises(DataError, match=r"source_0000002\.json, .* torn .*; delete .*rollout_0000002\.npz, and that"):
        store.read_source_state(2)
    with pytest.raises(DataError, match=r"source_0000001\.json, .* is missing"):
        store.read_source_state(1)


def test_a_state_that_is_nested_too_deeply_is_torn(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(batch().columns(), {})
    (tmp_path / "source_0000012.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"is missing or torn .it is nested too deeply"):
        store.read_source_state(12)


@pytest.mark.skipif(not Path("/dev/tty").exists(), reason="this machine lacks /dev/tty")
def test_a_rollout_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "rollout_0000012.npz").symlink_to("/dev/tty")
    with pytest.raises(DataError, match=r"rollout_0000012.npz is torn or not a rollout"):
        RolloutStore(tmp_path).read(12)
