import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_core.types import RolloutBatch, Sample
from slime_core.types.train import SHOWN
from slime_launch.flags import parse_train
from slime_launch.report.samples import read_kept
from slime_launch.shown import MOST_CHARACTERS, MOST_TOKENS, mark_shown, token_texts, write_shown


class Bytes:
    """A tokenizer with a token for every byte."""

    def __init__(self):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._inner = Tokenizer(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
        self._inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._inner.decoder = decoders.ByteLevel()

    def encode(self, text):
        return self._inner.encode(text).ids

    def decode(self, tokens, *, skip_special_tokens):
        return self._inner.decode(tokens, skip_special_tokens=skip_special_tokens)


BYTES = Bytes()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}")))
def test_texts_of_tokens_are_the_text(text):
    tokens = BYTES.encode(text)
    texts = token_texts(BYTES, tokens)
    assert len(texts) == len(tokens) and "".join(texts) == text


def test_bytes_that_are_no_character_are_shown_as_such():
    tokens = BYTES.encode("aé")
    assert token_texts(BYTES, [*tokens[:2], *tokens[:1]]) == ["a", "\N{REPLACEMENT CHARACTER}", "a"]


def batch(*, length=3, **fields):
    samples = [
        Sample(
            index=index,
            group_index=index // 2,
            prompt="how many?",
            tokens=[7, *range(length)],
            response_length=length,
            rollout_log_probs=[-0.123456] * length,
            weight_versions=[4] * length,
            reward=float(index % 2),
            metadata={"source": "m" * (MOST_CHARACTERS + 5)},
            **fields,
        )
        for index in range(6)
    ]
    return RolloutBatch(
        rollout_id=3, weight_version=5, groups=[samples[:2], samples[2:4]], dropped={"odd": samples[4:]}
    )


def settings_of(flags, to_words, **more):
    return parse_train(to_words(flags | {"--" + name.replace("_", "-"): str(value) for name, value in more.items()}))


def test_the_first_samples_and_a_dropped_group_are_kept(workspace, flags, to_words, caplog):
    (workspace / "hf" / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        write_shown(batch(), settings_of(flags, to_words, report_samples=3))
    samples, total = read_kept(workspace / "out" / "samples", last=3)
    assert [(one["index"], one["dropped"]) for one in samples] == [
        (0, None), (1, None), (2, None), (4, "odd"), (5, "odd"),
    ]  # fmt: skip
    first = samples[0]
    assert (first["rollout"], first["weight_version"], first["versions"]) == (4, 5, [4, 4, 4])
    assert first["log_probs"] == [-0.1235] * 3 and first["mask"] is None and first["cut"] is None
    assert first["tokens"] == [" 0", " 1", " 2"]  # the model's tokenizer is empty
    assert "the report will show tokens as numbers" in caplog.text
    assert len(first["metadata"]["source"]) == MOST_CHARACTERS + 2
    assert total == 5


def test_a_long_response_keeps_its_ends(workspace, flags, to_words):
    length = MOST_TOKENS + 50
    (workspace / "hf" / "tokenizer.json").write_text("{}")
    write_shown(batch(length=length, loss_mask=[0] + [1] * (length - 1)), settings_of(flags, to_words))
    first, *_ = read_kept(workspace / "out" / "samples", last=3)[0]
    half = MOST_TOKENS // 2
    assert first["cut"] == {"at": half, "left_out": 50} and first["length"] == length
    assert first["tokens"][half - 1 : half + 1] == [f" {half - 1}", f" {half + 50}"]
    assert len(first["tokens"]) == len(first["log_probs"]) == len(first["mask"]) == MOST_TOKENS
    assert first["mask"][:2] == [0, 1]


def test_nothing_is_kept_without_samples_to_show(workspace, flags, to_words):
    settings, columns = settings_of(flags, to_words, report_samples=0), batch().columns()
    write_shown(batch(), settings)
    mark_shown(columns, settings)
    assert not (workspace / "out").exists() and SHOWN not in columns.samples


@pytest.mark.parametrize("count", [1, 8])
def test_trainers_are_told_which(flags, to_words, count):
    columns = batch().columns()
    mark_shown(columns, settings_of(flags, to_words, report_samples=count))
    assert columns.samples[SHOWN].tolist() == [index < count for index in range(4)]
