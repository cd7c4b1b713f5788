"""Batches of conversations and of pairs: tokens, masks, epochs, a saved place, what is left out."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.errors import ConfigError, DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data_service import DataService, DataSpec, check_rows, count_rows

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|start|>"]
    bpe.train_from_iterator([], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", additional_special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def make(model, tmp_path):
    """A service over rows, not started; further keywords are flags."""

    def build(rows, kind, *, max_length=None, **flags):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = {"prompt_data": str(file), "rollout_batch_size": 2, **flags}
        config = RolloutConfig.of(hf_checkpoint=model, **flags)
        return DataService(DataSpec(rollout=config, rows=kind, max_length=max_length))

    return build


def talk(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]}


def trained_text(sample):
    """The trained characters of a response; a token is a byte here."""
    return sample.response if all(sample.trained_mask) else sum(sample.trained_mask)


def test_conversations_epoch_after_epoch_and_from_a_saved_place(make):
    rows = [talk(f"q{number}", f"a{number}") for number in range(3)]
    service = make(rows, "conversations", rollout_shuffle=True)
    assert service.start() == []
    batches = [service.generate(number) for number in range(2)]
    state = service.state_dict()
    batches += [service.generate(2)]
    texts = [[trained_text(group[0]) for group in batch.groups] for batch in batches]
    assert sorted(text for batch in texts for text in batch) == sorted(2 * [f"a{number}<|end|>" for number in range(3)])
    assert [batch.metrics["epoch"] for batch in batches] == pytest.approx([2 / 3, 4 / 3, 2])
    assert batches[0].metrics["trained_tokens"] == 6 and batches[0].metrics["truncated_ratio"] == 0
    again = make(rows, "conversations", rollout_shuffle=True)
    again.start()
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.generate(2).columns().samples["index"].tolist() == batches[2].columns().samples["index"].tolist()
    assert [group[0].tokens for group in again.generate(3).groups] == [
        group[0].tokens for group in service.generate(3).groups
    ]
    other = make(rows[:2], "conversations", rollout_shuffle=True)
    other.start()
    with pytest.raises(DataError, match=r"belongs to other prompts or another order \(prompts 3 → 2,"):
        other.load_state_dict(state)


@pytest.mark.parametrize(("kind", "texts"), [(None, "a<|end|>"), ("distill_qwen", "b<|end|>")])
def test_which_turns_are_trained_on(make, kind, texts):
    service = make([talk("1", "a", "2", "b")] * 2, "conversations", loss_mask_type=kind)
    service.start()
    sample = service.generate(0).samples[0]
    assert sample.response.startswith(texts)
    assert sum(sample.trained_mask) == (4 if kind is None else 2)


def test_what_is_too_long_is_cut_and_counted(make):
    service = make([talk("q", "a" * 50), talk("q" * 50, "a"), talk("q", "a")], "conversations", max_length=30)
    [notice] = service.start()
    assert notice.endswith("of 3 conversations left out 1 without a trained token within 30 tokens, and cut 1")
    assert max(len(sample.tokens) for sample in service.generate(0).samples) == 30


def test_pairs_and_held_out_pairs(make, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"question": "1", "good": "x", "bad": "y"}) + "\n")
    rows = [{"question": f"{number}", "good": "yes", "bad": "no"} for number in range(2)]
    keys = {"input_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    service = make(rows, "pairs", eval_prompt_data=("held", str(held)), **keys)
    service.start()
    batch = service.generate(0)
    assert [[sample.reward for sample in group] for group in batch.groups] == [[1.0, 0.0]] * 2
    assert batch.groups[0][0].response == "yes<|end|>"
    [(name, held_out)] = service.held_out(3).items()
    assert name == "held" and [sample.response for sample in held_out.samples] == ["x<|end|>", "y<|end|>"]


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([{"prompt": "1"}], "conversations", "no field 'messages' or 'conversations' for the conversation"),
        ([talk("1")], "conversations", "no message is the assistant's"),
        ([{"prompt": "1", "label": "2"}], "pairs", "no field 'chosen'"),
        ([{"prompt": "1", "chosen": "a", "rejected": "a"}], "pairs", "are the same, so nothing is preferred"),
        ([{"prompt": "1", "chosen": "", "rejected": "a"}], "pairs", "must be a string or a list of chat messages"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_before_a_run(make, rows, kind, message):
    config = make(rows, kind)._spec.rollout
    with pytest.raises(DataError, match=message):
        check_rows(config, kind)


def test_rows_are_counted_and_never_streamed(make):
    config = make([talk("q", "a")] * 5, "conversations", streaming_data=True)._spec.rollout
    assert count_rows(config.data.prompt_paths) == 5
    with pytest.raises(ConfigError, match="--streaming-data reads prompts"):
        check_rows(config, "conversations")
