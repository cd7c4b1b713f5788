"""Releases of ``torch_dist``, of any tensors by name."""

from slime_convert.files.reading import TensorReader, bytes_of
from slime_convert.files.tensors import LazyTensor
from slime_convert.files.writing import in_hand, write_files
from slime_convert.formats.torch_dist import TorchDistWeights
from slime_convert.formats.torch_dist_writer import MegatronTensor, new_release

NORM = "decoder.layers.{}.input_layernorm.weight"
FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"
FC1_KEY = "decoder.layers.mlp.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def lazy(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LazyTensor.made(dtype, tuple(tensor.shape), lambda: bytes_of(tensor))


def write_release(root, weights, args=None, **options):
    """A release of some tensors by name."""
    root.mkdir(parents=True, exist_ok=True)
    tensors = [MegatronTensor(in_hand(name, lazy(tensor))) for name, tensor in weights.items()]
    release = new_release(root, tensors, args or {}, **options)
    write_files(release.tensors)
    for name, data in release.others.items():
        (root / name).write_bytes(data)
    return root


def load(directory, name):
    with TensorReader() as reader:
        tensor = reader.load(TorchDistWeights(directory).tensor(name))
        reader.finish()
    return tensor
