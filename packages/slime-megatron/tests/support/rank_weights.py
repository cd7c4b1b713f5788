"""Commands of a rank for tests: what it says of its weights."""


class WeightChecks:
    """Of the rank's worker."""

    worker = None

    def weights(self):
        """The whole model under Hugging Face names, which every rank's part comes back from."""
        assert self.worker.export_mismatches() == []
        return self.push(0)[2]

    def mismatches_where(self, call, weight):
        """The mismatches where the map's ``call`` gives half of a weight twice."""
        import torch

        self.push(0)
        kept = self.worker._export._weights._map
        own = getattr(kept, call)

        def doubled(tensor):
            first = tensor.chunk(2)[0]
            return torch.cat([first, first])

        def broken(name, given):
            found = own(name, given)
            if name != weight:
                return found
            return [(part, doubled(one)) for part, one in found] if call == "to_hf" else doubled(found)

        setattr(kept, call, broken)
        try:
            return self.worker.export_mismatches()
        finally:
            delattr(kept, call)

    def weight_sums(self):
        """Names of the weights, and their checksums."""
        from slime_megatron.weights.sums import WeightSums

        sums = WeightSums(self.worker.model)
        return sums.names, sums(self.worker.model)
