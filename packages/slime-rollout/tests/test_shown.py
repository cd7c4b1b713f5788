import gzip
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_core.types import RolloutBatch, Sample
from slime_core.types.train import SHOWN
from slime_rollout.config import RolloutConfig
from slime_rollout.shown import MOST_CHARACTERS, MOST_TOKENS, SAMPLES_DIR, mark_shown, token_texts, write_shown


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


@pytest.fixture
def write(tmp_path):
    """Writes the first samples of a rollout, whose model's tokenizer is empty; gives what is in the file."""
    (tmp_path / "tokenizer.json").write_text("{}")
    config = RolloutConfig.of(hf_checkpoint=str(tmp_path), prompt_data="p", rollout_batch_size=1)

    def run(given, count):
        write_shown(given, config, count, tmp_path / "out")
        files = list((tmp_path / "out").glob(f"{SAMPLES_DIR}/*"))
        return [row for file in files for row in json.loads(gzip.decompress(file.read_bytes()))]

    return run


def test_the_first_samples_and_a_dropped_group_are_kept(write, caplog):
    with caplog.at_level(logging.WARNING):
        samples = write(batch(), 3)
    assert [(one["index"], one["dropped"]) for one in samples] == [
        (0, None), (1, None), (2, None), (4, "odd"), (5, "odd"),
    ]  # fmt: skip
    first = samples[0]
    assert (first["rollout"], first["weight_version"], first["versions"]) == (3, 5, [4, 4, 4])
    assert first["log_probs"] == [-0.1235] * 3 and first["mask"] is None and first["cut"] is None
    assert first["tokens"] == [" 0", " 1", " 2"]
    assert "the report will show tokens as numbers" in caplog.text
    assert len(first["metadata"]["source"]) == MOST_CHARACTERS + 2


def test_a_long_response_keeps_its_ends(write):
    length = MOST_TOKENS + 50
    first, *_ = write(batch(length=length, loss_mask=[0] + [1] * (length - 1)), 1)
    half = MOST_TOKENS // 2
    assert first["cut"] == {"at": half, "left_out": 50} and first["length"] == length
    assert first["tokens"][half - 1 : half + 1] == [f" {half - 1}", f" {half + 50}"]
    assert len(first["tokens"]) == len(first["log_probs"]) == len(first["mask"]) == MOST_TOKENS
    assert first["mask"][:2] == [0, 1]


def test_nothing_is_kept_without_samples_to_show(write, tmp_path):
    columns = batch().columns()
    write(batch(), 0)
    mark_shown(columns, 0)
    assert not (tmp_path / "out").exists() and SHOWN not in columns.samples


@pytest.mark.parametrize("count", [1, 8])
def test_trainers_are_told_which(count):
    columns = batch().columns()
    mark_shown(columns, count)
    assert columns.samples[SHOWN].tolist() == [index < count for index in range(4)]
