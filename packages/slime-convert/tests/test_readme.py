import re
import shutil
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_examples_run(one_origin, tmp_path, monkeypatch):
    shutil.copytree(one_origin, tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert len(blocks) == 3 and (tmp_path / "back" / "model.safetensors").is_file()
    assert [name.split(".")[-2] for name, _ in (namespace[k] for k in ("query", "key", "value"))] == [
        "q_proj",
        "k_proj",
        "v_proj",
    ]
