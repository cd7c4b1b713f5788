"""Commands of a rank for tests: which layers and kernels a model gets, and stand-ins for Transformer Engine's."""

import dataclasses


class TELayers:
    """What needs no worker."""

    def chosen_kernels(self, config, found, rendezvous):
        """What would be used of what a process finds, and whether prompts could be shared."""
        from slime_megatron.ranks.device import select_device

        select_device(1)
        from slime_megatron.model.kernels import FoundKernels, choose_kernels

        chosen = choose_kernels(config, FoundKernels(*found))
        return (*dataclasses.astuple(chosen), chosen.shares_prompts)

    def te_attention_calls(self):
        import te_stand_in

        return te_stand_in.DotProductAttention.calls

    def grouped_calls(self):
        import te_stand_in

        return te_stand_in.GroupedLinear.calls

    def fusing_layers(self, config, shape, rendezvous):
        """Which linear layers add gradients up, of a model built as on a GPU with Transformer Engine, without Apex."""
        from unittest import mock

        from slime_megatron.ranks.device import select_device
        from slime_megatron.ranks.parallel import join_ranks, leave_ranks

        device = select_device(1)
        from slime_megatron.model import build as model
        from slime_megatron.ranks.parallel import seed_everything

        def transformer_config(*args):
            made = make(*args)
            made.gradient_accumulation_fusion = True
            return made

        join_ranks(config, rendezvous, device)
        seed_everything(1)
        make = model.transformer_config
        with mock.patch.object(model, "transformer_config", transformer_config):
            [chunk] = model.build_model(shape, config, device)
        found = {}
        for name, module in chunk.named_modules():
            for attribute in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
                if hasattr(module, attribute):
                    found[name] = type(module).__name__, getattr(module, attribute)
        leave_ranks()
        return found


def pretend_engine():
    """Have Transformer Engine's layers and attention, of stand-ins; before anything imports Megatron."""
    import te_stand_in

    te_stand_in.install()
    from slime_megatron.ranks.device import select_device

    select_device(1)
    from slime_megatron.model import kernels

    def choose(config, found, choose=kernels.choose_kernels):
        """The stand-in for Transformer Engine's attention needs no 16 bit."""
        chosen = choose(config, found)
        return dataclasses.replace(chosen, te_attention=chosen.te_layers)

    kernels.found_kernels = lambda device: kernels.FoundKernels(cuda=True, transformer_engine=True)
    kernels.choose_kernels = choose
