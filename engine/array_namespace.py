"""Where the KV pool's memory comes from: numpy on CPUs, CuPy on GPUs, behind one small interface.

Storage is always a plain integer or float type that both array libraries know (bfloat16 is kept as its bits), so that
DLPack works everywhere; torch puts the meaning on with ``Tensor.view(dtype)``. CuPy is imported only where a GPU is
asked for. This module knows no page and no layer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, Protocol

import numpy as np
import torch

from ringserve.engine.kv_layout import ALIGNMENT as ALIGNMENT
from ringserve.engine.kv_layout import KVDType as KVDType
from ringserve.engine.kv_layout import has_scales as has_scales
from ringserve.engine.kv_layout import host_memory

_STORAGE: dict[KVDType, tuple[np.dtype[Any], torch.dtype]] = {
    "float32": (np.dtype(np.float32), torch.float32),
    "float16": (np.dtype(np.uint16), torch.float16),
    "bfloat16": (np.dtype(np.uint16), torch.bfloat16),
    "int8": (np.dtype(np.uint8), torch.int8),
    "float8": (np.dtype(np.uint8), torch.uint8),
}


def storage_dtype(dtype: KVDType) -> np.dtype[Any]:
    """The array library's type that holds ``dtype``'s bits."""
    return _STORAGE[dtype][0]


def torch_dtype(dtype: KVDType) -> torch.dtype:
    """What torch calls ``dtype``."""
    return _STORAGE[dtype][1]


class ArrayNamespace(Protocol):
    """A device's memory, as the pool needs it."""

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""

    def allocate(self, num_elements: int, dtype: np.dtype[Any]) -> Any:
        """A flat, aligned, uninitialised array. Raises MemoryError where the device has not that much."""

    def allocate_host(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Uninitialised uint8 memory of the host that the device can copy from and to on its own (pinned, for GPUs).
        Raises MemoryError where the host has not that much."""

    def to_torch(self, array: Any, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as a torch tensor of ``dtype`` (of the same element size); nothing is copied."""


class NumpyNamespace:
    """Memory of the host. The kernel commits it page by page as it is first written."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def allocate(self, num_elements: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        return host_memory(num_elements * dtype.itemsize).view(dtype)

    def allocate_host(self, num_bytes: int) -> np.ndarray[Any, Any]:
        return self.allocate(num_bytes, np.dtype(np.uint8))

    def to_torch(self, array: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).view(dtype)


class CupyNamespace:
    """Memory of one CUDA device, from a memory pool of its own: never CuPy's default pool, never torch's allocator."""

    def __init__(self, device_index: int = 0) -> None:
        self._cupy = import_module("cupy")
        self._index = device_index
        with self._cupy.cuda.Device(device_index):
            self._memory_pool = self._cupy.cuda.MemoryPool()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def allocate(self, num_elements: int, dtype: np.dtype[Any]) -> Any:
        cupy = self._cupy
        with cupy.cuda.Device(self._index), cupy.cuda.using_allocator(self._memory_pool.malloc):
            try:
                return cupy.empty(num_elements, dtype=dtype)
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error

    def allocate_host(self, num_bytes: int) -> np.ndarray[Any, Any]:
        # Not cupyx.empty_pinned: its pool takes the next power of two, up to twice what was asked for.
        cuda = self._cupy.cuda
        try:
            with cuda.Device(self._index):
                memory = cuda.PinnedMemory(num_bytes)
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{num_bytes} bytes of pinned host memory: {error}") from error
        return np.ndarray((num_bytes,), dtype=np.uint8, buffer=cuda.PinnedMemoryPointer(memory, 0))

    def to_torch(self, array: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
        return tensor.view(dtype)


def array_namespace(device: Literal["cpu", "cuda"]) -> ArrayNamespace:
    """The namespace of a device type. Raises ImportError where CuPy is needed and missing."""
    return CupyNamespace() if device == "cuda" else NumpyNamespace()
