import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_examples_of_chat_data_run(chat_tokenizers, tmp_path, monkeypatch, capsys):
    chat_tokenizers["marked"].save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (section,) = re.findall(r"^## Conversations.*?(?=^## Where prompts come from)", README, re.DOTALL | re.MULTILINE)
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 2
    scope = {}
    for example in examples:
        exec(compile(example.replace("path/to/model", "model"), "README.md", "exec"), scope)
    assert capsys.readouterr().out == "4<|im_end|>\n[3, 3] [1.0]\n"
