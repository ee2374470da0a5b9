"""Names of devices."""

from __future__ import annotations

import re

from pagecore.arrays.cuda.current import runtime
from pagecore.errors import DeviceError, shown

_CUDA = re.compile(r"cuda(?::([0-9]{1,4}))?")


_EXPECTED = "it must be 'cpu', 'cuda' or a numbered device such as 'cuda:1'"


def device_index(device: object) -> int | None:
    """Return the number of a CUDA device, or None for the host; raise DeviceError for any other name.

    ``"cuda"`` is ``"cuda:0"``, regardless of a framework's current device. The device need not exist; see
    `check_device`.
    """
    name = device if type(device) is str else _name_of(device)
    if name in ("cpu", "cpu:0"):
        return None
    match = _CUDA.fullmatch(name)
    if match is None:
        raise DeviceError(f"device is {name[:80]!r}; {_EXPECTED}")
    return int(match[1] or 0)


def _name_of(device: object) -> str:
    try:
        return str(device)
    except Exception as error:
        raise DeviceError(f"device is {shown(device)}; {_EXPECTED}") from error


def device_name(device: object) -> str:
    """Return the name of a device in the form of `Tensor.device`: "cpu", "cuda:0"; DeviceError as `device_index`."""
    index = device_index(device)
    return "cpu" if index is None else f"cuda:{index}"


def check_device(index: int) -> None:
    """Raise DeviceError if the process does not see CUDA device `index`."""
    count = runtime().num_devices()
    if index >= count:
        has = "no CUDA device" if count == 0 else f"{count} CUDA device{'s' if count > 1 else ''}, from cuda:0 on"
        raise DeviceError(f"device is 'cuda:{index}', but this process sees {has} (CUDA_VISIBLE_DEVICES limits it)")
