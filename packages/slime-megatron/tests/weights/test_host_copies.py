import pytest
import torch

from slime_megatron.weights.host_copies import HostWeights


def test_copies_take_the_place_of_weights_and_buffers_for_a_while():
    model = [torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)]
    kept = HostWeights(model)
    own = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1)
        model[1].running_mean.fill_(7)
    with pytest.raises(ValueError, match="wrong"), kept.in_place(model):
        assert torch.equal(model[0].weight, own) and not model[1].running_mean.any()
        raise ValueError("something is wrong")
    assert torch.equal(model[0].weight, own + 1) and (model[1].running_mean == 7).all()
    kept.put(model)
    assert torch.equal(model[0].weight, own) and not model[1].running_mean.any()
