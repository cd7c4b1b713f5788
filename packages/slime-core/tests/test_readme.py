import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_its_numbers_are_right(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope = {}
    exec(compile(example, str(README), "exec"), scope)
    metrics = scope["metrics"]
    # On-policy, the surrogate of each sample is its advantage: they cancel within a group. k1 is 0.1 everywhere.
    assert abs(metrics["pg_loss"].item()) < 1e-6
    assert abs(metrics["kl_loss"].item() - 0.1) < 1e-6
    assert abs(metrics["loss"].item() - 0.0001) < 1e-6
    assert scope["logits"].grad.isfinite().all()
    assert "pg_loss" in capsys.readouterr().out
