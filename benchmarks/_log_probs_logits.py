"""The sides of `log_probs` that start from logits: `_log_probs_logits.py DIRECTORY`, with settings.json in it.

Shapes: T tokens, V vocabulary ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from _measure import Side, rounds_of

from slime_core.ops import log_probs_and_entropy


def main(directory: Path) -> None:
    """Write result.json: seconds, extra bytes and the logits' bytes by side."""
    settings = json.loads((directory / "settings.json").read_text())
    torch.set_num_threads(1)
    dtype = getattr(torch, settings["kind"])
    sizes = settings["tokens"], settings["vocab"]
    for rounds, (tokens, vocab) in ((1, (64, 4096)), (settings["rounds"], sizes)):  # the first warms up
        result = run(tokens, vocab, dtype, rounds)
    (directory / "result.json").write_text(json.dumps(result, indent=1))


def run(tokens: int, vocab: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Forward and backward of the log-probs alone, by each side."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.empty(tokens, vocab, dtype=dtype).normal_(generator=generator).requires_grad_()
    targets_T = torch.randint(0, vocab, (tokens,), generator=generator)
    upstream_T = torch.randn(tokens, generator=generator)

    def ours() -> None:
        (log_probs_and_entropy(logits_TV, targets_T)[0] @ upstream_T).backward()  # type: ignore[no-untyped-call]

    def over_the_logits() -> None:
        made_TV = logits_TV.view_as(logits_TV)  # as if a model had made them; the same memory
        log_probs_T, _ = log_probs_and_entropy(made_TV, targets_T, overwrite_logits=True)
        torch.autograd.grad(log_probs_T @ upstream_T, made_TV)

    def log_softmax() -> None:
        log_p_TV = torch.log_softmax(logits_TV, -1)
        log_probs_T = log_p_TV.gather(1, targets_T.unsqueeze(1)).squeeze(1)
        (log_probs_T.float() @ upstream_T).backward()  # type: ignore[no-untyped-call]

    def clear() -> None:
        logits_TV.grad = None

    # The last one leaves other logits behind, which take as long to compute.
    sides: dict[str, Side] = {"ours": ours, "log_softmax": log_softmax, "ours, over the logits": over_the_logits}
    result = rounds_of(sides, clear, rounds)
    return {name: figures | {"logits": logits_TV.nbytes} for name, figures in result.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
