"""Repairs of Triton's interpreter (seen in 3.6 to 3.9), without which it is silently wrong on bfloat16.

The interpreter keeps bfloat16 as its bits in uint16. Stock versions

* multiply those bits as integers in ``tl.dot``;
* truncate where float32 becomes bfloat16, instead of rounding to nearest even as the hardware does;
* take the bits for the value in casts between bfloat16 and integers;
* (3.6) cannot use a loaded value as a loop bound with numpy >= 2.4.

``repair()`` must run before the first kernel does, in a process that started with ``TRITON_INTERPRET=1``.
"""

# Patches private parts of a package without types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


def _bits_to_float32(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _float32_to_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to nearest even, by torch."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
    return tensor.to(torch.bfloat16).view(torch.uint16).numpy().reshape(values.shape)


def _as_float(handle: Any) -> np.ndarray[Any, Any]:
    data: np.ndarray[Any, Any] = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        return _bits_to_float32(data)
    return data.astype(np.float32) if data.dtype == np.float16 else data


def repair() -> None:
    """Patch the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    handle_type = interpreter.TensorHandle
    stock_cast, stock_convert = builder.cast_impl, interpreter._convert_float

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(_as_float(a), _as_float(b), dtype=d.data.dtype)
        return handle_type(product + d.data, d.dtype.scalar)

    def convert_float(value, source, target, rounding):
        if source.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return _float32_to_bits(np.asarray(value).view(np.float32))
        return stock_convert(value, source, target, rounding)

    def cast_impl(self, source, target):
        from_type, to_type = source.dtype.scalar, target.scalar
        if to_type == tl.bfloat16 and not from_type.is_floating():
            return handle_type(_float32_to_bits(source.data.astype(np.float32)), tl.bfloat16)
        if from_type == tl.bfloat16 and not to_type.is_floating():
            return handle_type(_bits_to_float32(source.data).astype(interpreter._get_np_dtype(target)), to_type)
        return stock_cast(self, source, target)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    interpreter._convert_float = convert_float

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        stock_patch = interpreter._patch_lang_tensor

        def patch_lang_tensor(tensor, *arguments):
            result = stock_patch(tensor, *arguments)
            tensor.__index__ = lambda self: int(np.asarray(self.handle.data).squeeze())
            return result

        interpreter._patch_lang_tensor = patch_lang_tensor
