"""Calls of the CUDA driver that torch lacks: memory shared between processes, and streams that wait on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from penstock.errors import RunError

WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2**32
IPC_HANDLE_BYTES = 64
SLEEP_ON_WAIT_FLAG = 4  # CU_CTX_SCHED_BLOCKING_SYNC
LOW_32_BITS = 0xFFFFFFFF


class CudaDriver:
    """The CUDA driver, as seen from this process's current GPU."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RunError(
                f"ranks that share a GPU need the CUDA driver: {error}"
            ) from None
        address = ctypes.c_uint64
        value = ctypes.c_uint32
        flags = ctypes.c_uint32
        size = ctypes.c_size_t
        stream = ctypes.c_void_p
        self.raw_copy = _declare(
            self.cuda.cuMemcpyDtoDAsync_v2, address, address, size, stream
        )
        self.raw_wait = _declare(
            self.cuda.cuStreamWaitValue32_v2, stream, address, value, flags
        )
        self.raw_write = _declare(
            self.cuda.cuStreamWriteValue32_v2, stream, address, value, flags
        )

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function by name; raise a `RunError` if it fails."""
        function = getattr(self.cuda, name)
        self.check(function(*arguments), name)

    def check(self, code: int, name: str) -> None:
        """Raise a `RunError` with the driver's explanation if `code` is not zero."""
        if code == 0:
            return
        text = ctypes.c_char_p()
        self.cuda.cuGetErrorString(code, ctypes.byref(text))
        explanation = text.value.decode() if text.value else code
        raise RunError(f"{name}: {explanation}")

    def sleep_while_waiting(self, device: int) -> None:
        """Make the host sleep, not spin, while it waits for the GPU.

        This only works before the process uses the GPU for the first time.
        """
        self.cuda.cuDevicePrimaryCtxSetFlags_v2(
            ctypes.c_int(device), ctypes.c_uint(SLEEP_ON_WAIT_FLAG)
        )

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory that other processes can open, and return its address.

        Memory from torch's allocator is unsuitable: one block may hold unrelated tensors.
        """
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        # The memset returns early; without a wait, others could write before it runs.
        self.call("cuStreamSynchronize", ctypes.c_void_p(None))
        return address.value

    def handle(self, address: int) -> bytes:
        """The handle with which another process can open this memory."""
        raw = (ctypes.c_char * IPC_HANDLE_BYTES)()
        self.call("cuIpcGetMemHandle", raw, ctypes.c_uint64(address))
        return bytes(raw)

    def open(self, handle: bytes) -> int:
        """Open another process's memory, and return its address here."""
        address = ctypes.c_uint64()
        raw = _Handle()
        ctypes.memmove(ctypes.byref(raw), handle, IPC_HANDLE_BYTES)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, ctypes.c_uint(1))
        return address.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes within the GPU, in the order of a stream."""
        code = self.raw_copy(target, source, size, stream)
        self.check(code, "cuMemcpyDtoDAsync")

    def wait(self, address: int, value: int, stream: int) -> None:
        """Make a stream wait until the number at `address` is at least `value`."""
        code = self.raw_wait(stream, address, value & LOW_32_BITS, WAIT_UNTIL_AT_LEAST)
        self.check(code, "cuStreamWaitValue32")

    def write(self, address: int, value: int, stream: int) -> None:
        """Make a stream write a number, once its earlier work is done and visible."""
        code = self.raw_write(stream, address, value & LOW_32_BITS, 0)
        self.check(code, "cuStreamWriteValue32")


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_char * IPC_HANDLE_BYTES),)


def _declare(function: Any, *argument_types: Any) -> Callable[..., int]:
    """Declare the argument types of a driver function, so it accepts plain numbers.

    This is much faster than wrapping each argument in a ctypes object.
    """
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    declared: Callable[..., int] = function
    return declared
