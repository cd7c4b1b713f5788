import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from slime_rollout.generate import sampling_seed


def test_the_seed_is_what_it_was():
    assert sampling_seed(1234, 7) == 77130567019160112  # written down: must not change between versions


def test_other_processes_agree():
    code = "from slime_rollout.generate import sampling_seed; print(sampling_seed(1234, 7))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "5"},
    )
    assert int(done.stdout) == sampling_seed(1234, 7)


@given(st.integers(), st.integers(0), st.integers(0))
def test_fits_a_signed_64_bit_number(run_seed, index, turn):
    assert 0 <= sampling_seed(run_seed, index, turn) < 2**63


def test_all_parts_count():
    seeds = [
        sampling_seed(run, index, turn, stream)
        for run in range(5)
        for index in range(40)
        for turn in range(5)
        for stream in ("rollout", "eval/a")
    ]
    assert len(set(seeds)) == len(seeds)
