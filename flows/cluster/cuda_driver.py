"""A program that prints this machine's visible GPUs, as CUDA's driver describes them: one JSON object a line.

It runs in a process of its own, because one that has initialised CUDA cannot fork children that use it. It imports
no other module of the project, and makes no context, so it takes no memory of a GPU.
"""

import ctypes
import json
import sys

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: there is none, or none is visible
CLOCK_KHZ, MULTIPROCESSORS, MEMORY_KHZ, BUS_BITS, MAJOR, MINOR = 13, 16, 36, 37, 75, 76  # CUdevice_attribute


def main() -> None:
    """Print the GPUs. Exits with a sentence where the driver is missing or fails."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(f"{error}")

    def call(name: str, *arguments: object) -> None:
        if status := getattr(cuda, name)(*arguments):
            sys.exit(f"{name} gives CUDA error {status}")

    status = cuda.cuInit(0)
    if status == NO_DEVICE:
        return
    if status:
        sys.exit(f"cuInit gives CUDA error {status}")
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    for number in range(count.value):
        device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        figures = {}
        for attribute in (CLOCK_KHZ, MULTIPROCESSORS, MEMORY_KHZ, BUS_BITS, MAJOR, MINOR):
            value = ctypes.c_int()
            call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            figures[attribute] = value.value
        described = {
            "name": name.value.decode(),
            "memory_bytes": size.value,
            "capability": [figures[MAJOR], figures[MINOR]],
            "multiprocessors": figures[MULTIPROCESSORS],
            "clock_hz": figures[CLOCK_KHZ] * 1e3,
            "memory_bytes_per_s": 2 * figures[MEMORY_KHZ] * 1e3 * figures[BUS_BITS] / 8,
        }
        print(json.dumps(described))


if __name__ == "__main__":
    main()
