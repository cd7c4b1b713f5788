"""Commands of a rank for tests: what it says to the other ranks, in order."""


class Collectives:
    """Of the rank's worker."""

    worker = None

    def train_and_record_collectives(self, shards):
        """Train; the collectives of each process group that this rank is in, and what it sends and receives.

        A group is named by its number and its ranks; of each call there are the operation and, where all ranks give
        equally many, the numbers.
        """
        import torch
        import torch.distributed as dist
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        called = {}

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                if operation.namespace == "c10d":
                    leaves = tree_leaves((args, kwargs))
                    group = next(dist.ProcessGroup.unbox(one) for one in leaves if isinstance(one, torch.ScriptObject))
                    numbers = sum(one.numel() for one in leaves if isinstance(one, torch.Tensor))
                    place = (group.group_name, *dist.get_process_group_ranks(group))
                    name = operation.__name__.partition(".")[0]
                    peer = [args[2]] if name in ("send", "recv_") else []
                    is_even = not name.startswith("alltoall")
                    called.setdefault(place, []).append((name, *peer, numbers if is_even else None))
                return operation(*args, **(kwargs or {}))

        with Recorder():
            self.train(shards)
        return called
