"""A device without data: what a GPU would refuse, or wait for, fails here.

Tensors of the device lie on torch's ``meta`` device, so that those of the host cannot be mistaken for them, as they can
where both are a CPU's. ``device_rules`` watches every operation and every launch.
"""

# torch's dispatch modes and Triton are untyped for mypy.
# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from ringserve.engine.array_namespace import ArrayNamespace, NumpyNamespace
from ringserve.engine.gpu.device import HostDevice

META = torch.device("meta")


class MetaNamespace(NumpyNamespace):
    """Pages without data; the host's memory is there, and pinned."""

    def __init__(self, pinned: set[int]) -> None:
        self._pinned = pinned

    @property
    def device(self) -> torch.device:
        return META

    def allocate(self, num_elements: int, dtype: np.dtype[Any]) -> Any:
        return num_elements

    def allocate_host(self, num_bytes: int) -> np.ndarray[Any, Any]:
        array = np.zeros(num_bytes, dtype=np.uint8)
        self._pinned.add(array.ctypes.data)
        return array

    def to_torch(self, array: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(array, dtype=dtype, device=META)


class MetaDevice(HostDevice):
    """With enough multiprocessors that attention is split. Pinned memory is zeros."""

    def __init__(self) -> None:
        self.pinned_storages: set[int] = set()
        """Addresses."""

    @property
    def torch_device(self) -> torch.device:
        return META

    @property
    def num_multiprocessors(self) -> int:
        return 16

    @property
    def namespace(self) -> ArrayNamespace:
        return MetaNamespace(self.pinned_storages)

    def pinned(self, num_words: int) -> torch.Tensor:
        return self.pin(torch.zeros(num_words, dtype=torch.int32))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned_storages.add(tensor.untyped_storage().data_ptr())
        return tensor


class DeviceRules(TorchDispatchMode):
    """Tensors of host and device meet in copies alone, and these are asynchronous ones from and to pinned memory."""

    def __init__(self, device: MetaDevice, may_wait: bool) -> None:
        super().__init__()
        self._device = device
        self._may_wait = may_wait
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "aten::copy_":
            target, source = args[:2]
            if target.device != source.device:
                host, waits = source if target.device == META else target, not (args[2:] or [False])[0]
                self._check_copy(host, waits and not kwargs.get("non_blocking"))
                return target
        elif name == "aten::_to_copy" and kwargs.get("device", tensors[0].device) != tensors[0].device:
            assert tensors[0].device != META, "the host reads what the device has"
            self._check_copy(tensors[0], not kwargs.get("non_blocking"))
        else:
            assert len({tensor.device for tensor in tensors}) <= 1, f"{name} of tensors of host and device"
            created = kwargs.get("device")
            assert name != "aten::_local_scalar_dense" or tensors[0].device != META, "the host looks at the device"
            assert created is None or torch.device(created) != META or name != "aten::tensor", name
        return func(*args, **kwargs)

    def _check_copy(self, host: torch.Tensor, waits: bool) -> None:
        self.num_copies += 1
        if not self._may_wait:
            assert not waits, "a copy that the host waits for"
            assert host.untyped_storage().data_ptr() in self._device.pinned_storages, "a copy of pageable memory"


@contextmanager
def device_rules(device: MetaDevice, *, may_wait: bool = False) -> Iterator[DeviceRules]:
    """``may_wait``: copies may be of any kind, as at the start. Launches do nothing."""

    def launch(self: Any, *args: Any, grid: Any, warmup: Any = False, **kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device == META, f"{self.__name__}: the host's memory"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: device.pin(tensor.clone()))
        with DeviceRules(device, may_wait) as rules:
            yield rules
