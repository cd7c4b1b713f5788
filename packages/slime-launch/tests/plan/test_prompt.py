"""The first rows of a data set in a plan, and how long its samples are."""

import json

CONVERSATION = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]


def test_rows_are_as_long_as_the_longest_unless_the_command_says_more(planned, workspace):
    rows = [[{"role": "user", "content": "1 " * count}, CONVERSATION[1]] for count in (3, 90, 20)]
    bad = '{"messages": []}\n'
    (workspace / "train.jsonl").write_text(bad + "".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["--loss-type", "sft_loss", "--device-memory-gib", "400", "--on-bad-data", "skip"]
    code, plan, problems = planned(*words)
    assert (code, problems) == (0, [])
    assert plan["sizes"]["response_tokens"] == 90 + 3
    assert plan["samples"][0]["tokens"] == 3 + 3
    assert planned(*words, "--rollout-max-context-len", "50")[1]["sizes"]["response_tokens"] == 50


def test_a_bad_row_that_is_skipped_does_not_make_the_others_as_long_as_the_context(planned, workspace):
    rows = [[{"role": "user", "content": "1 " * count}, CONVERSATION[1]] for count in (3, 90, 20)]
    bad = json.dumps({"messages": "1 " * 500}) + "\n"
    (workspace / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows) + bad)
    words = ["--loss-type", "sft_loss", "--device-memory-gib", "400", "--on-bad-data", "skip"]
    code, plan, problems = planned(*words)
    assert (code, problems) == (0, [])
    assert plan["sizes"]["response_tokens"] == 90 + 3 == plan["row_tokens"][str(workspace / "train.jsonl")]


def test_how_rows_are_read_and_what_the_template_leaves_out_of_them(planned, workspace):
    """The template of these tests writes no calls; a call that is to be trained on is refused unless asked for."""
    words = ["--loss-type", "sft_loss", "--device-memory-gib", "400"]
    alpaca = {"instruction": "1 + 1 =", "input": "", "output": "2"}
    (workspace / "train.jsonl").write_text(json.dumps([alpaca, alpaca], indent=2))
    code, plan, problems = planned(*words)
    assert (code, problems) == (0, [])
    assert [line for line in plan["notices"] if "train.jsonl: read as Alpaca's: " in line]
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": [call]}]
    (workspace / "train.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    code, plan, problems = planned(*words)
    assert code == 2
    (problem,) = problems
    assert "the chat template leaves out what is to be trained on, of 1 rows: tool calls (in 1), first " in problem
    code, plan, problems = planned(*words, "--allow-left-out")
    assert (code, problems) == (0, [])
    assert any("the chat template leaves out, of 1 rows: tool calls (in 1)" in line for line in plan["notices"])
