import re

from slime_megatron.checkpoints.find import TRACKER
from slime_megatron.checkpoints.writer import _publish


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(ranks, tiny_model, tiny_config, tmp_path):
    """Both ranks say so at once, and nothing half-written stays; the next one, with room, is written."""
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), tensor_model_parallel_size=2)
    ranks.start(2, config, model.shape)
    ranks.call("save", 1)
    for answer in ranks.call("save_on_a_full_disk", 2, 1):
        assert answer.startswith(f"TrainerCheckpointError: cannot write the checkpoint {tmp_path / 'iter_0000002'}: ")
        assert "File too large (rank 1)" in answer and "\n" not in answer
    for answer in ranks.call("save_on_a_full_disk", 2, 1, 0):
        assert re.search(r": the disk is full \(.*File too large\) \(rank 1\); make room there", answer), answer
    names = ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / names[1]).read_text() == "1"
    ranks.call("save", 2)
    assert (tmp_path / names[1]).read_text() == "2"


def test_the_newest_is_named_by_way_of_no_link(tmp_path):
    save, mine = tmp_path / "save", tmp_path / "mine"
    mine.write_text("mine")
    (save / "iter_0000003.new").mkdir(parents=True)
    for name in (TRACKER, f"{TRACKER}.tmp"):
        (save / name).symlink_to(mine)
    _publish(save / "iter_0000003.new", save / "iter_0000003", 3)
    assert ((save / TRACKER).read_text(), mine.read_text()) == ("3", "mine")
