"""Memory comes as a buffer, by DLPack or by __cuda_array_interface__; no framework is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import kvprism
import numpy as np
import pytest


def tensor_of(memory: Any, **more: Any) -> kvprism.CacheTensor:
    return kvprism.CacheTensor(memory, layers=["l0"], block_stride=64, **more)


class OnlyDlpack:
    """What a framework's array looks like that has no buffer."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnlyCuda:
    """An array on an accelerator without DLPack; here its address is one of the host."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self._array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None,
            "version": 3,
        } | changes


def test_a_buffer() -> None:
    memory = bytearray(512)
    tensor = tensor_of(memory)
    assert (tensor.bytes, tensor.device) == (512, -1)
    with pytest.raises(BufferError):
        memory.append(0)


def test_dlpack() -> None:
    array = np.zeros((8, 32), dtype=np.float16)
    tensor = tensor_of(OnlyDlpack(array))
    assert (tensor.address, tensor.bytes, tensor.device) == (array.ctypes.data, 512, -1)


def test_cuda_array_interface() -> None:
    array = np.zeros((8, 32), dtype=np.float16)
    tensor = tensor_of(OnlyCuda(array), device=1)
    assert (tensor.address, tensor.bytes, tensor.device) == (array.ctypes.data, 512, 1)
    strided = tensor_of(OnlyCuda(array, strides=(64, 2)), device=0)
    assert strided.bytes == 512


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({}, None, "device = None: expected the accelerator's ordinal"),
        ({"strides": (128, 2)}, 0, "memory = strides with gaps: expected a contiguous array"),
        ({"data": (4096, True)}, 0, "memory = read-only: expected a writable array"),
        ({"data": 4096}, 0, "expected a dictionary as version 3"),
        ({"typestr": "?"}, 0, "expected a dictionary as version 3"),
        ({"shape": (2**40, 2**40)}, 0, "memory = a shape of more than 2^64 bytes: expected"),
    ],
)
def test_cuda_arrays_that_cannot_be_used(
    changes: dict[str, Any], device: int | None, message: str
) -> None:
    array = OnlyCuda(np.zeros((8, 32), dtype=np.float16), **changes)
    with pytest.raises(kvprism.ArgumentError) as error:
        tensor_of(array, device=device)
    assert message in str(error.value)


def test_a_device_that_the_array_contradicts() -> None:
    array = np.zeros((8, 32), dtype=np.float16)
    assert tensor_of(array, device=-1).device == -1
    with pytest.raises(kvprism.ArgumentError) as error:
        tensor_of(array, device=3)
    assert str(error.value) == (
        "cache tensor: device = 3: expected -1, where the array says that it lies, or None"
    )


def test_something_else() -> None:
    with pytest.raises(kvprism.ArgumentError) as error:
        tensor_of("memory")
    assert str(error.value) == (
        "cache tensor: memory = 'memory': expected a writable array (buffer, DLPack or "
        "__cuda_array_interface__), or an address with bytes"
    )


def test_neither_needs_a_framework() -> None:
    script = (
        "import sys, kvprism\n"
        "kvprism.CacheTensor(bytearray(512), layers=['l0'], block_stride=64)\n"
        "print(sorted({'torch', 'numpy', 'cupy', 'numba'} & set(sys.modules)))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"
