"""Commands whose plans several files of tests look at."""

import json

import pytest

from slime_convert.published import PUBLISHED
from slime_launch.cli import main
from support.large_plan import RUN


@pytest.fixture
def planned_large(tmp_path, monkeypatch, capsys, workspace):
    """A plan of the run on H100s with more words, as JSON or as text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)

    def plan(*more, text=False):
        words = ["--config", "run.toml", "--prompt-data", str(workspace / "train.jsonl"), *more]
        code = main(["plan", "--device", "h100", *([] if text else ["--json"]), *words])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out if text else json.loads(out)

    return plan


@pytest.fixture
def planned(workspace, tokenizer, flags, to_words, capsys):
    """Plans a command for H100s, with Llama 3 8B on one GPU for each half; gives exit code, plan and problems."""
    config = dict(PUBLISHED["llama3-8B"].config)
    (workspace / "hf" / "config.json").write_text(json.dumps(config))
    for name in ("--colocate", "--n-samples-per-prompt", "--global-batch-size", "--save"):
        del flags[name]
    flags["--rollout-num-gpus"] = "1"

    def run(*words, without=()):
        kept = {name: value for name, value in flags.items() if name not in without}
        code = main(["plan", "--device", "h100", "--json", *to_words(kept), *words])
        out, err = capsys.readouterr()
        problems = [line for line in err.splitlines() if line.startswith("slime-launch: ")]
        return code, json.loads(out), problems

    return run


@pytest.fixture
def words(flags, workspace, to_words):
    """A good command, whose tokenizer knows the prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([*map(str, range(10)), "+", "=", "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(workspace / "hf" / "tokenizer.json"))
    (workspace / "hf" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return lambda *more, **changed: [*to_words(flags | changed), *more]
