"""When the bytes of a step are in memory."""

from __future__ import annotations

import ctypes
from typing import Any

from .._core import ReadyToken

_CUDA_ERROR_NOT_READY = 600
_DISABLE_TIMING = 2


class HostReady:
    """Devices whose kernels are over when the step returns."""

    def token(self) -> ReadyToken:
        """A token for what has been computed so far."""
        return ReadyToken.host()


class SynchronizedReady:
    """Devices without an event that native code could ask: the step waits for its kernels."""

    def __init__(self, device_type: str) -> None:
        import torch

        self._module: Any = getattr(torch, device_type)

    def token(self) -> ReadyToken:
        """A token for what has been computed so far."""
        self._module.current_stream().synchronize()
        return ReadyToken.host()


class CudaReady:
    """An event of our own for each step, asked and destroyed by the worker's thread."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        library = ctypes.CDLL(_cudart_path())
        self._create = library.cudaEventCreateWithFlags
        self._create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
        self._record = library.cudaEventRecord
        self._record.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._query = _address(library.cudaEventQuery)
        self._destroy = _address(library.cudaEventDestroy)
        # A thread begins on device 0: a query there would set up a second context on it.
        self._bind = _address(library.cudaSetDevice)

    def token(self) -> ReadyToken:
        """A token for what has been queued on the current stream so far."""
        event = ctypes.c_void_p()
        self._check(self._create(ctypes.byref(event), _DISABLE_TIMING), "cudaEventCreateWithFlags")
        stream = self._torch.cuda.current_stream().cuda_stream
        self._check(self._record(event, ctypes.c_void_p(stream)), "cudaEventRecord")
        return ReadyToken.device_event(
            event.value or 0,
            self._query,
            _CUDA_ERROR_NOT_READY,
            self._destroy,
            self._bind,
            self._torch.cuda.current_device(),
        )

    @staticmethod
    def _check(status: int, call: str) -> None:
        if status != 0:
            raise RuntimeError(f"{call} failed with CUDA error {status}")


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _cudart_path(maps: str = "/proc/self/maps") -> str:
    """The CUDA runtime that PyTorch has loaded into this process: events belong to one runtime.

    Mooncake may have loaded another one, of another major version.
    """
    import torch

    major = str(torch.version.cuda).split(".")[0]
    found = set()
    with open(maps, encoding="utf-8") as lines:
        for line in lines:
            path = line.rsplit(" ", 1)[-1].strip()
            if "/libcudart" in path:
                found.add(path)
    if not found:
        raise RuntimeError("PyTorch has loaded no libcudart: no event can be recorded")
    return min(found, key=lambda path: (f".so.{major}" not in path, path))


def ready_source(device_type: str) -> HostReady | SynchronizedReady | CudaReady:
    """How to make tokens for a type of device as PyTorch names it."""
    if device_type == "cpu":
        return HostReady()
    import torch

    # PyTorch calls the devices of ROCm "cuda", and has another runtime for them.
    if device_type == "cuda" and torch.version.hip is None:
        return CudaReady()
    return SynchronizedReady(device_type)
