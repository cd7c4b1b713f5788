"""A plan as text."""

from support.planning import run


def test_a_good_command_is_planned(words, workspace, capsys):
    code, out, err = run(words("--n-samples-per-prompt", "2"), capsys)
    assert (code, err) == (0, "")
    assert "4 prompts × 2 samples = 8 = 1 steps × global batch 8" in out
    assert "first prompt, 4 tokens, label '1':\n    0 + 1 =" in out
    assert f"{workspace / 'train.jsonl'}: 8 usable rows" in out
    assert "node 0: trainer ranks 0; engine 0 on slot 0" in out
    assert not (workspace / "out").exists()
    assert not (workspace / "save").exists()
