import re
from pathlib import Path

import slime_core

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_example_runs_as_shown(capsys):
    """Each block of Python is followed by what it prints; later blocks use the names of earlier ones."""
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert len(examples) == README.count("```python") == 5
    scope = {}
    for code, shown in examples:
        exec(compile(code, "README.md", "exec"), scope)
        assert capsys.readouterr().out == shown
    assert scope["logits"].grad.isfinite().all()


def test_every_name_in_the_tables_is_there():
    (table,) = re.findall(r"\| you want \| take \|\n.*?\n\n", README, re.DOTALL)
    for row in table.strip().splitlines()[2:]:
        holder = slime_core
        for path in re.findall(r"`(\w[\w.]*)`", row.split("|")[2]):
            parts = path.split(".")
            # `ops.tis_weights`, then further names of what holds it.
            if len(parts) > 1 or hasattr(slime_core, parts[0]):
                holder = slime_core
            for name in parts:
                value = getattr(holder, name)
                holder = value if name != parts[-1] else holder
    modules = re.findall(r"^\| `slime_core\.(\w+)`(.*?)\|", README, re.MULTILINE)
    assert len(modules) == 9
    for module, further in modules:
        for name in [module, *re.findall(r"`\.(\w+)`", further)]:
            assert hasattr(slime_core, name), name
