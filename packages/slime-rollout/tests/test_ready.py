from slime_core.types import Sample
from slime_rollout.ready import examples


def test_a_row_of_several_turns_shows_what_was_asked_before_its_first_trained_answer():
    turns = [("user", "one?"), ("assistant", "first"), ("user", "two?"), ("assistant", "second")]
    messages = [{"role": role, "content": text} for role, text in turns]
    responses = {"one?": "first<|end|>\nuser\ntwo?\nassistant\nsecond<|end|>", "two?": "second<|end|>"}
    for asked, response in responses.items():
        sample = Sample(index=0, group_index=0, prompt=messages, tokens=[1], response=response)
        assert [one["prompt"] for one in examples([sample], of_data=True)] == [asked]


def test_examples_of_conversations_show_the_question():
    question, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    prompts = ([question], [question, answer], [question, answer, question, answer], "2 + 2?", [answer])
    samples = [Sample(index=at, group_index=at, prompt=prompt, tokens=[1]) for at, prompt in enumerate(prompts)]
    shown = [examples(samples[at : at + 1])[0]["prompt"] for at in range(len(samples))]
    assert shown == ["2 + 2?"] * 4 + ["4"]
