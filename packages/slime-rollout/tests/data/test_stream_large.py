"""`--streaming-data` on a file of 50 GB: its first samples, and those at 49 GB where a run goes on, come in a second.

The file is sparse: rows at its beginning, rows at 49 GiB, and holes, which take no room on the disk. Whoever counted
lines or read up to a place would have to read the holes, a line of 49 GiB.
"""

import json
import subprocess
import sys
import textwrap

import pytest

SIZE, FAR = 50 * 2**30, 49 * 2**30
ROWS = 400
MOST_BYTES, MOST_SECONDS = 4e6, 10.0


@pytest.fixture
def large_file(tmp_path):
    """Rows 0 to 399 at the beginning, 400 to 799 at 49 GiB."""
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for begin in (0, ROWS):
            file.seek(FAR if begin else 0)
            for place in range(begin, begin + ROWS):
                row = {"prompt": f"{place} + 1 =", "label": str(place + 1), "metadata": {"x": "x" * 1000}}
                file.write(json.dumps(row).encode() + b"\n")
        file.truncate(SIZE)
    yield path
    path.unlink()


PROGRAM = """
    import copy, ctypes, json, pathlib, sys, time
    sys.modules["torch"] = None  # transformers would import it, for many seconds
    from slime_core.hooks import HookArgs
    from slime_rollout.config import RolloutConfig
    from slime_rollout.data import Fate, PromptEncoder, check_prompt_data, load_source, load_tokenizer

    def status(file, name):
        lines = pathlib.Path("/proc/self", file).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    def measured(call):
        ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        memory, begun = status("status", "VmRSS"), status("io", "rchar")
        wall, cpu = time.monotonic(), time.process_time()
        labels, state = call()
        return state, {
            "labels": labels,
            "wall": time.monotonic() - wall,
            "cpu": time.process_time() - cpu,
            "read": status("io", "rchar") - begun,
            "memory": 1024 * (status("status", "VmHWM") - memory),
        }

    directory, path, shuffle = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
    config = RolloutConfig.of(
        hf_checkpoint=directory, prompt_data=path, rollout_batch_size=8, streaming_data=True, rollout_shuffle=shuffle,
        **({"streaming_shuffle_buffer": 100} if shuffle else {}),
    )
    encoder = PromptEncoder(load_tokenizer(directory), apply_chat_template=False)
    encoder.encode("1 + 1 =")

    def start(state=None):
        # All that a run does before its first prompts, and the position as it is saved.
        check_prompt_data(config)
        source = load_source(config, encoder, HookArgs({}))
        if state is not None:
            source.load_state_dict(json.loads(state))
        groups = source.get_samples(8)
        source.ledger.settle(groups, Fate.TRAINED)
        assert source.check_ledger() is None
        return [int(group[0].label) for group in groups], json.dumps(source.state_dict())

    state, first = measured(start)
    again, second = measured(lambda: start(state))
    # As if the run had come that far: the same state, with the place in the file where the later rows begin.
    far = json.loads(again)
    far["position"][0] |= {"mark": {"row": 400, "line": 401, "offset": int(sys.argv[4])}, "number": 400, "done": 0}
    state, third = measured(lambda: start(json.dumps(far)))
    state, fourth = measured(lambda: start(state))
    print(json.dumps({"starts": [first, second, third, fourth], "position": json.loads(state)["position"][0]}))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_of_50_gb_starts_and_goes_on_at_once(large_file, tokenizer_dir, shuffle):
    file = large_file.stat()
    assert file.st_size == SIZE
    held = 512 * file.st_blocks
    assert held < 64e6, f"{large_file.parent} cannot hold sparse files ({held} bytes used); give another --basetemp"
    code = [sys.executable, "-c", textwrap.dedent(PROGRAM), tokenizer_dir, str(large_file), str(shuffle), str(FAR)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    starts = result["starts"]
    for start in starts:
        assert start["read"] < MOST_BYTES, starts
        assert start["memory"] < 64e6, starts
        assert max(start["wall"], start["cpu"]) < MOST_SECONDS, starts
    labels = [start["labels"] for start in starts]
    if shuffle:
        assert all(len(set(one)) == 8 for one in labels)
        near, far = set(labels[0] + labels[1]), set(labels[2] + labels[3])
        assert len(near) == len(far) == 16
        assert near <= set(range(1, 101))
        assert far <= set(range(401, 501))
    else:
        assert labels == [list(range(begin, begin + 8)) for begin in (1, 9, 401, 409)]
    assert result["position"]["mark"]["offset"] >= FAR
    assert (result["position"]["number"], result["position"]["done"]) == ((400, 16) if shuffle else (416, 0))
