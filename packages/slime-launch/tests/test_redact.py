"""Settings without secrets."""

from slime_launch.redact import HIDDEN, without_secrets
from slime_launch.resume import changed_flags


def test_secrets_are_known_by_name_by_form_and_by_the_environment():
    values = {
        "wandb_key": "abc", "sglang_api_key": "k", "input_key": "prompt", "max_tokens_per_gpu": 9,
        "train_env_vars": '{"OPENAI_API_KEY": "sk-x", "A": "b"}', "note": "hf_0123456789abcdefXYZ", "plain": "text",
        "url": "http://h/x?api_key=12345&y=1", "list": ["Bearer zzzz", "fine"], "empty_token": None,
    }  # fmt: skip
    assert without_secrets(values, {}) == {
        "wandb_key": HIDDEN, "sglang_api_key": HIDDEN, "input_key": "prompt", "max_tokens_per_gpu": 9,
        "train_env_vars": f'{{"OPENAI_API_KEY": "{HIDDEN}", "A": "b"}}', "note": HIDDEN, "plain": "text",
        "url": f"http://h/x?api_key={HIDDEN}&y=1", "list": [f"Bearer {HIDDEN}", "fine"], "empty_token": None,
    }  # fmt: skip


def test_secrets_may_change_and_what_stands_beside_them_may_not():
    old = {"some_url": "http://[removed]@h/x", "some_vars": '{"A": "b"}', "save": None}
    assert changed_flags(old, old | {"some_url": "http://me:other@h/x"}) == []
    assert changed_flags(old | {"some_url": "http://me:first@h/x"}, old) == []
    assert len(changed_flags(old, old | {"some_url": "http://me:other@i/x"})) == 1
    assert len(changed_flags(old, old | {"some_vars": '{"A": "c"}'})) == 1
