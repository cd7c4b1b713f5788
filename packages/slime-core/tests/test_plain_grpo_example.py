import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "plain_grpo.py"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples belong to the repository, not to the package")
def test_the_plain_loop_learns(capsys):
    spec = importlib.util.spec_from_file_location("plain_grpo", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main()
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 30
    assert rewards[0] < 0.2  # chance is 0.1
    assert rewards[-1] > 0.95
