"""Parameters that are kept in host memory and are on the device only while something needs them.

Frozen weights never change, so offloading only frees the device's memory. What trains is copied back to host memory
first. Onloading copies the weights from host memory while the device computes other things.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rlhf_tasks.parallel.comm.copier import Arrival, Copier, host_copies
from rlhf_tasks.parallel.train.optimizer import MasterWeights


class HostCopy:
    """Tensors on the device that are kept in host memory. At first they are only there, not on the device.

    held     the tensors
    use      lets their owner use others of the same shapes; those without elements mean that they are offloaded
    changes  their values change while they are on the device

    Using parameters while they are offloaded raises an error in torch, because they have no elements. Call `wait`
    before using them.
    """

    def __init__(
        self,
        held: Sequence[Tensor],
        use: Callable[[Sequence[Tensor]], None],
        copies: Copier,
        changes: bool = False,
    ) -> None:
        self._held = list(held)
        self._use = use
        self._copies = copies
        self._changes = changes
        self._arrival: Arrival | None = None
        self._kept = [copies.kept(tensor) for tensor in held]
        self._free()

    @classmethod
    def of_module(cls, module: nn.Module, copies: Copier) -> "HostCopy":
        """Of a frozen module's parameters."""
        parameters = list(module.parameters())

        def use(tensors: Sequence[Tensor]) -> None:
            for parameter, tensor in zip(parameters, tensors, strict=True):
                parameter.data = tensor

        return cls([parameter.data for parameter in parameters], use, copies)

    @classmethod
    def of_master(cls, master: MasterWeights, copies: Copier) -> "HostCopy":
        """Of parameters that train. Their state stays where it is."""
        return cls([master.weights], lambda tensors: master.use(*tensors), copies, changes=True)

    @property
    def is_away(self) -> bool:
        """Whether the tensors are offloaded: no onload was started since the last offload."""
        return self._arrival is None

    def onload(self) -> None:
        """Start the copy to the device, into new tensors."""
        assert self.is_away, "the parameters are on the device already"
        self._held = [
            torch.empty_like(kept, device=away.device, pin_memory=False)
            for kept, away in zip(self._kept, self._held, strict=True)
        ]
        self._arrival = self._copies.start(list(zip(self._kept, self._held, strict=True)))
        self._use(self._held)

    def wait(self) -> None:
        """Everything computed after this call sees the parameters on the device."""
        assert self._arrival is not None, "the parameters are in host memory: no onload was started"
        self._arrival.wait()

    def offload(self) -> None:
        """Free the device's tensors. Waits for a copy in progress first, because it still writes to them. Where they
        change, host memory has their values when this call returns."""
        self.wait()
        if self._changes:
            host_copies(self._held, self._kept)
        self._free()

    def _free(self) -> None:
        self._arrival = None
        self._held = [tensor.new_empty(0) for tensor in self._held]
        self._use(self._held)
