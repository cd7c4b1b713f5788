import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_examples_of_chat_data_run(chat_tokenizers, tmp_path, monkeypatch, capsys):
    chat_tokenizers["marked"].save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (section,) = re.findall(r"^## Conversations.*", PAGE, re.DOTALL | re.MULTILINE)
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 2
    scope = {}
    for example in examples:
        exec(compile(example.replace("path/to/model", "model"), "data.md", "exec"), scope)
    assert capsys.readouterr().out == "4<|im_end|>\n[3, 3] [1.0]\n"
