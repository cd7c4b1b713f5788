import numpy as np

from slime_core.hooks import HookArgs
from slime_core.types import TrainSample
from slime_rollout.config import RolloutConfig
from slime_rollout.hooks.train_data import DataPostprocess


def test_columns_of_what_is_trained_on(tmp_path):
    body = """
    rollout_data["rewards"] = torch.tensor([0.5, 1.5])
    rollout_data["raw_reward"] = [torch.tensor(1.0), np.float32(2)]
    rollout_data["loss_masks"] = torch.tensor([[True, False], [False, True]])
    rollout_data["rollout_log_probs"] = [torch.tensor([-1.0, -2.0], dtype=torch.bfloat16), [torch.tensor(-3.0), -4.0]]
    rollout_data["own"] = (torch.tensor(7), np.array([1.0, 2.0]))
"""
    path = tmp_path / "own.py"
    path.write_text(f"import numpy as np\nimport torch\n\ndef own(args, rollout_id, rollout_data):\n    {body}")
    given = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1}
    config = RolloutConfig.of(**given, rollout_data_postprocess_path=f"{path}:own")
    postprocess = DataPostprocess(config, HookArgs({}))
    samples = [
        TrainSample(
            index=number,
            group_index=0,
            tokens=np.arange(3, dtype=np.int32),
            response_length=2,
            loss_mask=np.ones(2, np.uint8),
            trajectory_tokens=2,
            reward=0.0,
            raw_reward=0.0,
            rollout_log_probs=np.zeros(2, np.float32),
        )
        for number in range(2)
    ]
    one, other = postprocess(0, samples)
    assert [(sample.reward, sample.raw_reward) for sample in (one, other)] == [(0.5, 1.0), (1.5, 2.0)]
    assert [sample.loss_mask.tolist() for sample in (one, other)] == [[1, 0], [0, 1]]
    assert [sample.rollout_log_probs.tolist() for sample in (one, other)] == [[-1.0, -2.0], [-3.0, -4.0]]
    assert one.extras["own"] == 7 and other.extras["own"].tolist() == [1.0, 2.0]
