import json

from slime_convert.check import CheckResult, Proof


def test_a_result_as_text_and_json():
    rows = (Proof("transformers", True, "the same logits"), Proof("Megatron", None, "megatron-core is not installed"))
    result = CheckResult("a tiny model", rows)
    assert result.passed
    assert result.to_text().splitlines() == [
        "a tiny model",
        "",
        "transformers  passed   the same logits",
        "Megatron      not run  megatron-core is not installed",
        "",
        "passed",
    ]
    failed = CheckResult("a tiny model", (*rows, Proof("export", False, "a weight differs")))
    assert not failed.passed
    assert failed.to_text().endswith("\n\nfailed")
    assert json.loads(json.dumps(failed.to_json())) == {
        "passed": False,
        "model": "a tiny model",
        "rows": [
            {"name": "transformers", "outcome": "passed", "detail": "the same logits"},
            {"name": "Megatron", "outcome": "not run", "detail": "megatron-core is not installed"},
            {"name": "export", "outcome": "failed", "detail": "a weight differs"},
        ],
    }
