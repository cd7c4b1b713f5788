"""A weight sync sends exactly the Hugging Face weights, in buckets, from rank 0, or from several in turn."""

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("name", "tensor_parallel"),
    [("llama-tied", 1), ("qwen2-tied", 2), ("glm4", 2), pytest.param("qwen3", 1, marks=pytest.mark.full)],
)
def test_push_sends_the_hugging_face_weights(ranks, tiny_model, tiny_config, name, tensor_parallel):
    model = tiny_model(name)
    limit = 100_000
    config = tiny_config(
        load=model.checkpoint, tensor_model_parallel_size=tensor_parallel, update_weight_buffer_size=limit
    )
    ranks.start(tensor_parallel, config, model.shape)
    (report, events, tensors), *others = ranks.call("push", 3)

    expected = {key: value.numpy() for key, value in model.hf.state_dict().items()}
    if model.hf.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(tensors[key], value, err_msg=key)
    total = sum(value.nbytes for value in expected.values())
    assert (report.version, report.tensors, report.bytes) == (3, len(expected), 2 * total)
    assert events[0] == ("begin", 3) and events[-1] == ("end",)
    sizes = [event[1] for event in events[1:-1]]
    assert len(sizes) > 2 and sum(sizes) == total
    largest = max(value.nbytes for value in expected.values())
    assert all(size <= max(limit, largest) for size in sizes)
    assert all(other_events == [] for _, other_events, _ in others)


def test_other_replicas_do_nothing(ranks, tiny_model, tiny_config):
    model = tiny_model("qwen3")
    ranks.start(2, tiny_config(load=model.checkpoint), model.shape)
    (report, events, _), (idle, no_events, _) = ranks.call("push", 1)
    assert report.tensors == len(model.hf.state_dict()) and events[0] == ("begin", 1)
    assert (idle.version, idle.tensors, idle.bytes, no_events) == (1, 0, 0, [])


def test_each_sender_has_all_weights_and_does_not_wait_for_one_that_fails(ranks, tiny_model, tiny_config):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    ranks.start(4, config, model.shape)
    expected = {key: value.numpy() for key, value in model.hf.state_dict().items()}
    for refused_by in (None, 0, 2):
        found = ranks.call("push_from", (0, 2), refused_by)
        assert [found[rank] for rank in (1, 3)] == [(0, {})] * 2
        for rank in (0, 2):
            if rank == refused_by:
                assert found[rank] == "no send"
                continue
            count, tensors = found[rank]
            assert count == len(expected) and tensors.keys() == expected.keys()
            for key, value in expected.items():
                np.testing.assert_array_equal(tensors[key], value, err_msg=key)


def test_the_next_bucket_is_gathered_while_one_is_sent(ranks, tiny_model, tiny_config):
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    assert ranks.call("gathers_while_sending") == [True]


def test_where_sending_fails_no_rank_waits_and_the_weights_can_be_sent_again(ranks, tiny_model, tiny_config):
    model = tiny_model("qwen3")
    ranks.start(2, tiny_config(load=model.checkpoint, tensor_model_parallel_size=2), model.shape)
    for call in ("begin", "send", "end"):
        assert ranks.call("push_from", (0,), 0, call) == [f"no {call}", (0, {})]
    (report, _, tensors), _ = ranks.call("push", 2)
    assert report.tensors == len(tensors) == len(model.hf.state_dict())
    for key, value in model.hf.state_dict().items():
        np.testing.assert_array_equal(tensors[key], value.numpy(), err_msg=key)
