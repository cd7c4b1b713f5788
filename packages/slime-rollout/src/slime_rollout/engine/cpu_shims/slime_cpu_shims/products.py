"""Products and activations in fp32 that give a token the same bits whatever else is in the batch.

MKL multiplies one to three rows by other kernels than four and more; with some numbers of threads also what is left
over of a multiple of four. So few rows are padded, to a multiple that is found out when the engine starts. What is in a
batch depends on when requests arrive; then it changes no log-prob.
"""

import functools
import logging

import torch
from torch.nn.functional import pad

# Up to how many rows a product may be padded, and to which multiples.
FEW = 16
MULTIPLES = (4, 8, 16)
# A product with fewer columns is computed otherwise for any number of rows.
NARROW = 16

# Torch gives a thread so many numbers at least, or half for some functions, and computes so many at a time.
GRAIN = 32768
VECTOR = 32


def enable():
    """In place of SGLang's ``enable_batch_invariant_mode``, whose kernels are Triton's."""
    functional = torch.nn.functional
    for where, name, around in (
        (functional, "linear", linear),
        (torch, "matmul", matmul),
        (torch, "bmm", bmm),
        (functional, "silu", elementwise),
        (functional, "gelu", gelu),
        (torch, "sigmoid", elementwise),
        (torch.Tensor, "sigmoid", elementwise),
    ):
        setattr(where, name, _around(getattr(where, name), around))


def _around(original, around):
    """A function rather than a partial one, which would not be bound as a method."""
    return lambda *args, **kwargs: around(original, *args, **kwargs)


def linear(original, input, weight, bias=None):
    """Around ``torch.nn.functional.linear``."""
    rows = input.numel() // max(input.shape[-1], 1)
    if not (extra := missing(rows, len(weight), weight.dtype)):
        return original(input, weight, bias)
    padded = pad(input.reshape(rows, -1), (0, 0, 0, extra))
    return original(padded, weight, bias)[:rows].view(*input.shape[:-1], -1)


def matmul(original, input, other, **how):
    """Around ``torch.matmul``, as of hidden states with the head's weights."""
    plain = input.dim() == other.dim() == 2 and not how
    extra = missing(len(input), other.shape[1], other.dtype) if plain else 0
    return original(pad(input, (0, 0, 0, extra)), other)[: len(input)] if extra else original(input, other, **how)


def bmm(original, input, mat2, out=None):
    """Around ``torch.bmm``: each head's rows, in multi-head latent attention."""
    rows = input.shape[1]
    if not (extra := missing(rows, mat2.shape[2], mat2.dtype)):
        return original(input, mat2, out=out)
    product = original(pad(input, (0, 0, 0, extra)), mat2)[:, :rows]
    return product if out is None else out.copy_(product)


def elementwise(original, input, *args, **kwargs):
    """Around a function of single numbers that torch computes otherwise for what is left over of whole vectors."""
    size, threads = input.numel(), torch.get_num_threads()
    while extra := -size % (VECTOR if size <= GRAIN // 2 else VECTOR * threads * min(threads, -(-size // GRAIN))):
        size += extra
    is_whole = input.is_contiguous() or input.shape[-1] % VECTOR == 0
    if input.dtype != torch.float32 or (is_whole and size == input.numel()):
        return original(input, *args, **kwargs)
    whole = input.new_zeros(size)
    whole[: input.numel()].view(input.shape).copy_(input)
    return original(whole, *args, **kwargs)[: input.numel()].view(input.shape)


def gelu(original, input, approximate="none"):
    """Around ``torch.nn.functional.gelu``, which is oneDNN's where the numbers are contiguous, as those of one row."""
    return elementwise(original, input.contiguous(), approximate=approximate)


def missing(rows, columns, dtype):
    """Rows to add to a product with so many."""
    if dtype != torch.float32:
        return 0
    multiple, most = rule()
    return -rows % multiple if rows <= most or columns < NARROW else 0


@functools.cache
def rule():
    """The multiple that this process's kernels need, and up to how many rows; both found by trying."""
    rows_MK, weight_KN = torch.arange(2 * FEW * 64).sin().view(-1, 64), torch.arange(48 * 64).cos().view(48, 64).t()
    whole = torch.mm(rows_MK, weight_KN)

    def is_like_whole(rows):
        return torch.equal(torch.mm(rows_MK[:rows], weight_KN), whole[:rows])

    most = next((rows for rows in range(2 * FEW - 1, 0, -1) if not is_like_whole(rows)), 0)
    for multiple in MULTIPLES:
        if most < FEW and all(is_like_whole(rows) for rows in range(multiple, most + multiple, multiple)):
            return multiple, most
    logging.getLogger(__name__).warning(
        "products of %s rows differ from those of more, whatever they are padded to: the last bits of log-probs may "
        "depend on what is in a batch",
        most,
    )
    return 1, 0
