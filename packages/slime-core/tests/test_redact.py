"""Secrets in text, and text that only looks like them."""

import io
import logging

import pytest

from slime_core.redact import HIDDEN, is_secret, redact_logs, redacted, secrets_of
from support.planted import planted

PLANTED = planted()
AROUND = ("{}", "before {} after", '{{"value": "{}"}}', "note={}", "('{}',)")


def test_there_are_forty():
    assert len(PLANTED) == len({secret for _, secret in PLANTED.values()}) == 40


@pytest.mark.parametrize("name", PLANTED)
def test_a_secret_is_known_by_its_form_or_by_what_is_before_it(name):
    text, secret = PLANTED[name]
    for around in AROUND:
        found = redacted(around.format(text))
        assert HIDDEN in found and not any(part in found for part in secret.split("\n")), found


@pytest.mark.parametrize(
    "text",
    [
        "step 10/100 reward 0.5 loss -0.057 kl 0.417 grad norm 3.16 generate 0.7 s train 0.6 s",
        "--input-key prompt --label-key label --reward-key score --metadata-key m --tool-key tools",
        "commit ac" + "0123456789" * 3 + "abcdef01, sha256 " + "0f" * 32,
        "basic self-distillation, token per-token-loss, digest of megatron_core.models.gpt.gpt_layer_specs_for_all",
        "http://127.0.0.1:8000/v1/models?limit=5&key_id=3",
        "https://h/docs#authorization",
        '{"eos_token": "<|im_end|>", "pad_token": "<pad>", "max_tokens": 512}',
        "/data/checkpoints/iter_0000010/model-00001-of-00002.safetensors",
        "slime_rollout.generate.client: 3 requests wait at http://10.0.0.1:30000, 12:30:45",
        "num_key_value_heads=8, key=value, monkey=banana, donkey: grey",
        "uuid 123e4567-e89b-12d3-a456-426614174000 at 2026-11-30T12:00:00.123456",
        "Qwen/Qwen3-30B-A3B-Instruct-2507, SmolLM2-135M-Instruct, moe_permute_fusion_with_experts.router",
    ],
)
def test_other_text_stays(text):
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc", "Authorization: [removed]"),
        ("{'authorization': 'Token abc', 'x': 1}", "{'authorization': '[removed]', 'x': 1}"),
        ("http://me:hunter22@h/x?api_key=5&y=1", "http://[removed]@h/x?api_key=[removed]&y=1"),
        ("https://hooks.slack.com/services/T000/B000/abcdef", "https://hooks.slack.com/services/[removed]"),
        ("password='hunter22' of me", "password='[removed]' of me"),
        (
            r'"{\"authorization\": \"Basic abc\", \"a_key\": \"b\"}"',
            r'"{\"authorization\": \"[removed]\", \"a_key\": \"[removed]\"}"',
        ),
        ("A=b=c password=hunter2==", "A=b=c password=[removed]"),
    ],
)
def test_what_stands_beside_a_secret_stays(text, expected):
    assert redacted(text) == expected


def test_names():
    for name in ("WANDB_API_KEY", "OPENAI_KEY", "--sglang-api-key", "x-api-key", "MY_PWD", "AWS_SECRET_ACCESS_KEY"):
        assert is_secret(name), name
    for name in ("PWD", "OLDPWD", "--input-key", "eos-token", "SSH_AUTH_SOCK", "RAY_AUTH_MODE", "key", "num_key_heads"):
        assert not is_secret(name), name


def test_secrets_of_the_environment_are_found_in_other_text():
    secrets = secrets_of({"A_KEY": "of no known form", "B_TOKEN": "short", "PLAIN": "an ordinary value"})
    assert secrets == ["of no known form"]
    assert redacted("it is of no known form, and short", secrets) == f"it is {HIDDEN}, and short"


def test_logs_and_tracebacks_are_redacted(monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", "of no known form")
    before = logging.getLogRecordFactory()
    try:
        redact_logs()
        redact_logs()  # once is enough
        log = logging.getLogger("redacted")
        log.warning("%s and %s", "of no known form", PLANTED["GitHub"][0])
        try:
            raise ValueError(PLANTED["bearer"][0])
        except ValueError:
            log.exception("failed")
        handler = logging.StreamHandler(stream := io.StringIO())
        for record in caplog.records:
            handler.handle(record)
    finally:
        logging.setLogRecordFactory(before)
    text = stream.getvalue()
    assert text.startswith(f"{HIDDEN} and {HIDDEN}\nfailed\nTraceback")
    assert not any(secret in text for secret in ("of no known form", PLANTED["GitHub"][1], PLANTED["bearer"][1]))
