"""Files of tensors: written once, and continued where an earlier run was stopped."""

import threading

import pytest

from slime_convert.errors import CheckpointError
from slime_convert.files import writing
from slime_convert.files.tensors import LazyTensor, StoredBytes, tensor_info
from slime_convert.files.writing import NewTensor, Placed, Segment, TensorFile, in_hand, write_files

DATA = [bytes(range(10)), b"x" * 33, b"", bytes(range(100, 120))]


def made(data, seen=None, name=None):
    def make():
        if seen is not None:
            seen.append(name)
        return memoryview(data)

    return LazyTensor.made("uint8", (len(data),), make)


def files(directory, data=DATA, seen=None, stop_at=None):
    """Two files of two tensors each; behind each tensor its checksum as text."""
    result = []
    for number in range(2):
        offset, placed = 4, []
        for index in (2 * number, 2 * number + 1):
            name, content = f"t{index}", data[index]

            end = offset + len(content)

            def seal(checksum, end=end):
                return [Segment(end, b"%010d" % checksum if checksum else b" " * 10)]

            tensor = made(content, seen, name)
            load = (lambda: 1 / 0) if index == stop_at else (lambda tensor=tensor: tensor)
            placed.append(Placed(NewTensor(tensor.info(name), load), offset, seal))
            offset += len(content) + 10
        blanks = [Segment(0, b"HEAD"), *(Segment(p.offset + p.tensor.info.nbytes, b" " * 10) for p in placed)]
        result.append(TensorFile(directory / f"f{number}", offset, blanks, placed))
    return result


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_everything_is_in_its_place(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(writing, "CHUNK_BYTES", chunk)
    calls = []
    write_files(files(tmp_path), lambda *call: calls.append(call))
    assert {name: data[:4] for name, data in contents(tmp_path).items()} == {"f0": b"HEAD", "f1": b"HEAD"}
    found = contents(tmp_path)
    assert found["f0"][4:14] == DATA[0] and found["f0"][24:57] == DATA[1] and found["f1"][14:34] == DATA[3]
    assert calls[0] == (0, 63) and calls[-1] == (63, 63) and calls == sorted(calls)


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_what_is_finished_is_not_made_again(tmp_path, stop_at):
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    write_files(files(tmp_path / "whole"))
    with pytest.raises(ZeroDivisionError):
        write_files(files(tmp_path / "cut", stop_at=stop_at))
    seen, calls = [], []
    write_files(files(tmp_path / "cut", seen=seen), lambda *call: calls.append(call))
    assert seen == [f"t{index}" for index in range(stop_at, 4) if DATA[index]]
    assert calls[0] == (sum(map(len, DATA[:stop_at])), 63)
    assert contents(tmp_path / "whole") == contents(tmp_path / "cut")
    seen.clear()
    write_files(files(tmp_path / "cut", seen=seen))
    assert seen == []


def test_every_flipped_byte_of_what_was_kept_is_noticed(tmp_path):
    write_files(files(tmp_path))
    right = contents(tmp_path)
    for name, data in right.items():
        for place in range(len(data)):
            wrong = bytearray(data)
            wrong[place] ^= 1
            (tmp_path / name).write_bytes(wrong)
            write_files(files(tmp_path))
            assert contents(tmp_path) == right, (name, place)


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-1], lambda data: b""])
def test_a_file_of_another_size_is_begun_again(tmp_path, change):
    write_files(files(tmp_path))
    right = contents(tmp_path)
    (tmp_path / "f0").write_bytes(change(right["f0"]))
    write_files(files(tmp_path))
    assert contents(tmp_path) == right


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path):
    tensor = NewTensor(tensor_info("a", "uint8", (3,)), lambda: made(b"xx"))
    file = TensorFile(tmp_path / "f", 3, [], [Placed(tensor, 0, lambda checksum: [])])
    with pytest.raises(ValueError, match=r"a must be uint8 \(3,\), not uint8 \(2,\)"):
        write_files([file])


def test_damage_that_shows_at_the_end_only_is_an_error(tmp_path):
    """A part of a stored tensor is written; the rest is read for its checksum."""
    (tmp_path / "source").write_bytes(b"abcdef")
    place = StoredBytes(tmp_path / "source", 0, 6, "x", 12345)
    tensor = LazyTensor.stored("uint8", (6,), place)
    from slime_convert.files.tensors import narrow

    file = TensorFile(tmp_path / "f", 2, [], [Placed(in_hand("a", narrow(tensor, 0, 1, 2)), 0, lambda checksum: [])])
    with pytest.raises(CheckpointError, match="the checksum of x is wrong"):
        write_files([file])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_reading_thread_is_raised_and_the_thread_ends(tmp_path, kind):
    def wrong():
        raise kind("wrong")

    tensors = [in_hand("a", made(b"xx")), NewTensor(tensor_info("b", "uint8", (2,)), wrong)]
    placed = [Placed(tensor, 2 * number, lambda checksum: []) for number, tensor in enumerate(tensors)]
    with pytest.raises(kind, match="wrong"):
        write_files([TensorFile(tmp_path / "f", 4, [], placed)])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("read_ahead", "flush"))]


def test_large_files_are_flushed_beside_the_writing(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(writing, "_FLUSH_BYTES", 5)
    flush = writing._flush
    monkeypatch.setattr(
        writing, "_flush", lambda descriptor: flushed.append(threading.current_thread()) or flush(descriptor)
    )
    write_files(files(tmp_path))
    assert flushed and threading.main_thread() not in flushed
