"""A model with its optimizer and its checkpoints."""


def test_the_first_rollout_waits_for_no_optimizer(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("llama-tied")
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    for call in ("sleep", "wake"):
        ranks.call(call)
    assert not ranks.first("has_optimizer")
    ranks.call("train", make_shards(make_samples()))
    assert ranks.first("has_optimizer")


def test_load_goes_back_to_a_checkpoint(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, save=str(tmp_path)), model.shape)
    shards = make_shards(make_samples(), steps=2)
    ranks.call("train", shards)
    ranks.call("save", 1)
    expected = ranks.first("train", shards).steps
    assert ranks.first("load", str(tmp_path)) == 1
    assert ranks.first("train", shards).steps == expected
