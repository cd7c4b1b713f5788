import pytest
import torch

from slime_megatron.settings.config import MegatronConfig
from slime_megatron.step.optimizer import build_scheduler


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warm_up", [{}, {"lr_warmup_iters": 4, "lr_warmup_init": 1e-5}, {"lr_warmup_fraction": 0.3}])
def test_the_rate_of_a_step_is_that_of_megatrons_scheduler(style, warm_up):
    decay = {"lr_decay_style": style, "min_lr": 2e-5} if style != "constant" else {}
    decay |= {"lr_decay_iters": 9} if decay or "lr_warmup_fraction" in warm_up else {}
    config = MegatronConfig(lr=1e-4, **decay, **warm_up)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=config.lr)
    scheduler = build_scheduler(optimizer, config)
    for step in range(14):
        assert config.rate_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        scheduler.step(1)
