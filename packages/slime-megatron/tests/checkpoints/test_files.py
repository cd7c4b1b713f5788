"""Files are whole, and what torch makes of their tensors is what was written."""

import errno
import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from slime_megatron.checkpoints import files as checkpoint_files
from slime_megatron.checkpoints.files import BLOCK_BYTES, NewFile

TENSORS = [
    torch.randn(3, 5),
    torch.randn(7, 4).t(),
    torch.randn(()).bfloat16(),
    torch.empty(0, 3, dtype=torch.float16),
    torch.arange(5),
    torch.tensor([True, False]),
    torch.randn(4, 4).to(torch.float8_e4m3fn),
]


def values(count):
    return (np.arange(count) % 251).astype(np.uint8)


@pytest.mark.parametrize("count", [0, 1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 4 * BLOCK_BYTES + 4097])
def test_all_bytes_are_there(tmp_path, count):
    with NewFile(tmp_path / "file") as file:
        for part in np.array_split(values(count), 7):
            given = part.copy()
            file.write(given)
            given[:] = 255  # it has been taken
    assert (tmp_path / "file").read_bytes() == values(count).tobytes()


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_torch_reads_a_tensor(tmp_path, tensor):
    with NewFile(tmp_path / "file") as file:
        checkpoint_files._write_tensor(file, tensor)
    found = torch.load(io.BytesIO((tmp_path / "file").read_bytes()), weights_only=True)
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert torch.equal(found.float(), tensor.float())


def test_a_tensor_that_was_written_can_be_emptied(tmp_path):
    tensor = torch.ones(5)
    with NewFile(tmp_path / "file") as file:
        checkpoint_files._write_tensor(file, tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("refused", ["opening", "writing"])
def test_a_file_system_that_must_go_by_the_page_cache(tmp_path, monkeypatch, refused):
    real_open, real_write = os.open, os.pwrite

    def open_file(path, flags, *mode):
        if refused == "opening" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    def write(descriptor, data, offset):
        flags = checkpoint_files.fcntl.fcntl(descriptor, checkpoint_files.fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwrite", write)
    with NewFile(tmp_path / "file") as file:
        file.write(values(3 * BLOCK_BYTES + 5))
    assert (tmp_path / "file").read_bytes() == values(3 * BLOCK_BYTES + 5).tobytes()


def test_an_error_of_a_block_is_raised(tmp_path):
    """In a process that may write no larger file: what a full disk is, too, at some block."""
    code = f"""
import resource, sys
import numpy as np
from pathlib import Path
from slime_megatron.checkpoints.files import BLOCK_BYTES, NewFile
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK_BYTES, 2 * BLOCK_BYTES))
try:
    with NewFile(Path({str(tmp_path / "file")!r})) as file:
        for _ in range(5):
            file.write(np.ones(BLOCK_BYTES, np.uint8))
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != -signal.SIGXFSZ
    assert "File too large" in done.stdout, done.stderr
