"""Frozen parameters that are kept in host memory and are on the device only during their calls.

Frozen weights never change, so offloading only frees the device's memory. Onloading copies the weights from host
memory while the device computes other things.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlhf_tasks.parallel.comm.copier import Arrival, Copier


class HostCopy:
    """A frozen module whose parameters are kept in host memory. At first they are only there, not on the device.

    Using the module while its parameters are offloaded raises an error in torch, because they have no elements. Call
    `wait` before using the module.
    """

    def __init__(self, module: nn.Module, copies: Copier) -> None:
        self._parameters = dict(module.named_parameters())
        self._copies = copies
        self._arrival: Arrival | None = None
        with torch.no_grad():
            self._kept: Mapping[str, Tensor] = {
                name: copies.kept(parameter.data) for name, parameter in self._parameters.items()
            }
        self.offload()

    @property
    def is_away(self) -> bool:
        """Whether the parameters are offloaded: no onload was started since the last offload."""
        return self._arrival is None

    def onload(self) -> None:
        """Start the copy to the device, into new tensors."""
        assert self.is_away, "the parameters are on the device already"
        pairs = []
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty_like(self._kept[name], device=parameter.device, pin_memory=False)
            pairs.append((self._kept[name], parameter.data))
        self._arrival = self._copies.start(pairs)

    def wait(self) -> None:
        """Everything computed after this call sees the parameters on the device."""
        assert self._arrival is not None, "the parameters are in host memory: no onload was started"
        self._arrival.wait()

    def offload(self) -> None:
        """Free the device's tensors. Waits for a copy in progress first, because it still writes to them."""
        if self._arrival is not None:
            self._arrival.wait()
        self._arrival = None
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
