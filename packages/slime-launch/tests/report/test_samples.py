"""The samples that a run has kept."""

from slime_launch.report.samples import MOST_BYTES, read_kept
from slime_rollout.shown import MOST_TOKENS
from support.run_files import keep, kept_sample


def test_what_was_cut_out_of_a_response_is_cut_out_of_its_numbers(tmp_path):
    values, half = list(range(MOST_TOKENS + 100)), MOST_TOKENS // 2
    keep(tmp_path, 0, [kept_sample(0, cut={"at": half, "left_out": 100})], {"0": {"advantages": values}})
    [[found], total] = read_kept(tmp_path / "samples", last=0)
    assert found["advantages"] == values[:half] + values[-half:] and total == 1


def test_of_a_long_run_some_rollouts_are_read_and_torn_files_are_not(tmp_path):
    noise = "".join(chr(33 + (number * 7919) % 90) for number in range(997)) * 40
    for rollout in range(6):
        keep(tmp_path, rollout, [kept_sample(rollout, text=noise)])
    size = MOST_BYTES // 2
    for path in (tmp_path / "samples").iterdir():
        with path.open("ab") as file:
            file.truncate(max(size, path.stat().st_size))  # sparse; zeros after a gzip file are ignored
    samples, total = read_kept(tmp_path / "samples", last=5)
    assert [one["index"] for one in samples] == [0, 3] and total == 6
    (tmp_path / "samples" / "rollout_0000003.json.gz").write_bytes(b"torn")
    assert [one["index"] for one in read_kept(tmp_path / "samples", last=5)[0]][:1] == [0]
