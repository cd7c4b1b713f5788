"""Commands of a rank for tests: a worker that takes its CPU for a GPU, with `offload_stand_in`, and what it holds."""

import dataclasses
from unittest import mock


class HostOptimizer:
    """Of the rank's worker."""

    worker = None

    def build_on_gpu(self, config, algorithm, shape, rendezvous, **how):
        """Build a worker as on a GPU, beside which there is host memory."""
        from slime_megatron.ranks import device

        found = device.select_device(1)
        from offload_stand_in import Host, install

        install()

        class Gpu(device.Device):
            is_cpu = False

            def holds(self, tensor):
                return not isinstance(tensor, Host)

        from slime_megatron.worker import trained_model

        def build_model(shape, config, device, build=trained_model.build_model, **how):
            return build(shape, config, found, **how)

        gpu = Gpu(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
        with (
            mock.patch.object(device, "select_device", return_value=gpu),
            mock.patch.object(trained_model, "build_model", build_model),
        ):
            self.build(config, algorithm, shape, rendezvous, **how)
        self.worker._roles._device = self.worker._reports._device = found  # CUDA is asked for its memory

    def host_bytes(self):
        """Bytes of the optimizer that are in host memory: master weights, moments and gradients."""
        from offload_stand_in import Host

        found = {}
        for part in self.worker._roles.actor.optimizer.chained_optimizers:
            for adam in getattr(part.optimizer, "cpu_optimizers", ()):
                for group in adam.param_groups:
                    for param in group["params"]:
                        for tensor in (param, param.grad, *adam.state[param].values()):
                            if isinstance(tensor, Host):
                                found[tensor.data_ptr()] = tensor.nbytes
        return sum(found.values())
