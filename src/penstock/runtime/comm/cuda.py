"""The few calls of the CUDA driver that torch does not offer: memory that processes share, streams that wait for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from penstock.errors import RunError

WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: a cyclic comparison
HANDLE = 64  # bytes of a CUDA IPC handle
BLOCKING = 4  # CU_CTX_SCHED_BLOCKING_SYNC: a host that waits sleeps


class CudaDriver:
    """The driver of this process's current GPU."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RunError(
                f"ranks that share a GPU need the CUDA driver: {error}"
            ) from None
        place, number, stream = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
        self.raw_copy = _typed(
            self.cuda.cuMemcpyDtoDAsync_v2, place, place, ctypes.c_size_t, stream
        )
        self.raw_wait = _typed(
            self.cuda.cuStreamWaitValue32_v2, stream, place, number, number
        )
        self.raw_write = _typed(
            self.cuda.cuStreamWriteValue32_v2, stream, place, number, number
        )

    def call(self, name: str, *arguments: object) -> None:
        """Calls it, or says what is wrong."""
        self.check(getattr(self.cuda, name)(*arguments), name)

    def check(self, code: int, name: str) -> None:
        """An error in words."""
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RunError(f"{name}: {text.value.decode() if text.value else code}")

    def sleep_while_waiting(self, device: int) -> None:
        """A host that waits for the GPU leaves its core to others. Only before the GPU is used for the first time."""
        self.cuda.cuDevicePrimaryCtxSetFlags_v2(
            ctypes.c_int(device), ctypes.c_uint(BLOCKING)
        )

    def allocate(self, size: int) -> int:
        """Memory that can be opened by others (torch's own may share a block with something else), all zeros."""
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", place, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self.call(
            "cuStreamSynchronize", ctypes.c_void_p(None)
        )  # a memset returns early; others would write before it
        return place.value

    def handle(self, place: int) -> bytes:
        """What others open it with."""
        raw = (ctypes.c_char * HANDLE)()
        self.call("cuIpcGetMemHandle", raw, ctypes.c_uint64(place))
        return bytes(raw)

    def open(self, handle: bytes) -> int:
        """Memory of another process."""
        place, raw = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(raw), handle, HANDLE)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(place), raw, ctypes.c_uint(1))
        return place.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Inside the device, on a stream."""
        self.check(self.raw_copy(target, source, size, stream), "cuMemcpyDtoDAsync")

    def wait(self, place: int, value: int, stream: int) -> None:
        """The stream waits until that place has at least that value."""
        self.check(
            self.raw_wait(stream, place, value & 0xFFFFFFFF, WAIT_VALUE_GEQ),
            "cuStreamWaitValue32",
        )

    def write(self, place: int, value: int, stream: int) -> None:
        """The stream writes a value there, after all before it is done and visible."""
        self.check(
            self.raw_write(stream, place, value & 0xFFFFFFFF, 0), "cuStreamWriteValue32"
        )


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_char * HANDLE),)


def _typed(call: Any, *kinds: Any) -> Callable[..., int]:
    """A call whose arguments are plain numbers: much faster than to wrap each one."""
    call.argtypes, call.restype = kinds, ctypes.c_int
    made: Callable[..., int] = call
    return made
