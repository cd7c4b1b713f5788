"""Parts of a train step in plain PyTorch on transformers."""

import torch

# Adam divides by √v + eps: with a tiny eps, rounding errors of vanishing gradients would become whole steps.
ADAM_EPS = 1e-4


def close(got, wanted, tolerance=1e-5):
    return abs(got - wanted) <= tolerance * max(1.0, abs(wanted))


def same_step(got, wanted, names=("loss", "pg_loss", "kl_loss", "grad_norm"), tolerance=1e-5):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        for name in names:
            assert close(one[name], other[name], tolerance), (name, one[name], other[name])


def plain_log_probs(model, sample, temperature):
    """In the model's own precision."""
    logits = model(torch.tensor([sample.tokens])).logits[0] / temperature
    start = sample.prompt_length - 1
    rows = logits[start : len(sample.tokens) - 1].log_softmax(-1)
    return rows.gather(1, torch.tensor(sample.tokens[sample.prompt_length :])[:, None])[:, 0]


def plain_adamw(model, config):
    """AdamW that leaves vectors without weight decay, as Megatron does."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
