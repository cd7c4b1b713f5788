"""The sides of `log_probs` that start from hidden states: `_log_probs_linear.py DIRECTORY`, with settings.json in it.

TRL's and verl's files are loaded by path; their packages would import Ray, DeepSpeed and more. TRL's file takes one
name from its package, a context that gathers a weight under DeepSpeed and else does nothing; it gets the latter.

Shapes: T tokens, V vocabulary ids, D hidden size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from _measure import Side, rounds_of
from torch import Tensor

from slime_core.ops import linear_log_probs_and_entropy

TRL_DEFAULT_CHUNK = 32_768  # what TRL's trainers pass
Outputs = tuple[Tensor, Tensor]


def main(directory: Path) -> None:
    """Write result.json: seconds and extra bytes by side."""
    settings = json.loads((directory / "settings.json").read_text())
    torch.set_num_threads(1)
    others = Path(settings["others"])
    sizes = settings["tokens"], settings["vocab"], settings["kind"]
    for rounds, (tokens, vocab, hidden) in ((1, (64, 4096, 64)), (settings["rounds"], sizes)):  # the first warms up
        problem = Problem(others, tokens, vocab, hidden)
        sides = {name: problem.side(name) for name in settings["sides"]}
        result = rounds_of(sides, problem.clear, rounds)
    for name, figures in result.items():
        figures["extra"] -= 0 if name == "bare" else problem.gradient_bytes
    (directory / "result.json").write_text(json.dumps(result, indent=1))


class Problem:
    """Random inputs of one size, and the sides that run on them."""

    def __init__(self, others: Path, tokens: int, vocab: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden_TD = torch.randn(tokens, hidden, generator=generator).bfloat16().requires_grad_()
        self.weight_VD = torch.empty(vocab, hidden, dtype=torch.bfloat16)
        self.weight_VD.normal_(std=hidden**-0.5, generator=generator).requires_grad_()
        self.targets_T = torch.randint(0, vocab, (tokens,), generator=generator)
        self.upstream_T = torch.randn(tokens, generator=generator)
        self.gradient_bytes = self.hidden_TD.nbytes + self.weight_VD.nbytes
        self.others = others

    def clear(self) -> None:
        """Drop the gradients."""
        self.hidden_TD.grad = self.weight_VD.grad = None

    def side(self, name: str) -> Side:
        """What runs under a name."""
        if name == "bare":
            return self.bare()
        if name == "ours":
            return lambda: self.step(self.ours)
        if name == "verl":
            fused = load(self.others / "verl" / "utils" / "experimental" / "torch_functional.py").FusedLinearForPPO()
            return lambda: self.step(lambda: fused(self.hidden_TD, self.weight_VD, self.targets_T))
        chunk = TRL_DEFAULT_CHUNK if name == "trl" else 4096
        function = load_trl(self.others).ChunkedLogProbFunction
        inputs = (self.hidden_TD, self.weight_VD, None, self.targets_T, 1.0, chunk, None, 1.0, ("entropy",))
        return lambda: self.step(lambda: function.apply(*inputs)[:2])

    def step(self, forward: Callable[[], Outputs]) -> None:
        """Forward and backward, with a gradient for log-probs and entropies."""
        log_probs_T, entropy_T = forward()
        (log_probs_T @ self.upstream_T + entropy_T.float() @ self.upstream_T).backward()  # type: ignore[no-untyped-call]

    def ours(self) -> Outputs:
        """Log-probs and entropies of slime-core."""
        log_probs_T, entropy_T = linear_log_probs_and_entropy(
            self.hidden_TD, self.weight_VD, self.targets_T, with_entropy=True
        )
        assert entropy_T is not None
        return log_probs_T, entropy_T

    def bare(self) -> Side:
        """The four products, each whole, into memory that is there already."""
        hidden_TD, weight_VD = self.hidden_TD.detach(), self.weight_VD.detach()
        logits_TV = hidden_TD.new_zeros(len(hidden_TD), len(weight_VD))
        grad_TD, grad_VD = torch.zeros_like(hidden_TD), torch.zeros_like(weight_VD)

        def products() -> None:
            for _ in range(2):  # the forward pass, and again in the backward pass
                torch.mm(hidden_TD, weight_VD.t(), out=logits_TV)
            torch.mm(logits_TV, weight_VD, out=grad_TD)
            torch.mm(logits_TV.t(), hidden_TD, out=grad_VD)

        return products


def load(path: Path, name: str = "one_file") -> ModuleType:
    """A module from its file alone."""
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"no module in {path}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def load_trl(others: Path) -> ModuleType:
    """TRL's file, inside packages that hold nothing but what it imports from them."""
    utils = ModuleType("one_trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()  # type: ignore[attr-defined]
    names = ("one_trl", "one_trl.trainer", "one_trl.kernels")
    sys.modules |= {name: ModuleType(name) for name in names} | {utils.__name__: utils}
    return load(others / "trl" / "kernels" / "chunked_logprob.py", "one_trl.kernels.chunked_logprob")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
