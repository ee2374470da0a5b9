"""Virtual memory of the driver: the calls of libcuda, recorded by a substitute."""

import ctypes

import pytest

from pagecore.arrays.cuda import driver_memory
from pagecore.errors import DeviceError, NotEnoughMemory

PAGE = 2 << 20


class Library:
    """Functions of libcuda that record their arguments and write results; `statuses` are replies other than 0."""

    def __init__(self, **statuses):
        self.calls, self.statuses = [], statuses

    def __getattr__(self, name):
        if not name.startswith("cuMem") or self.statuses.get(name) == "missing":
            raise AttributeError(name)

        def function(*arguments):
            assert len(arguments) == len(function.argtypes)
            converted = [kind.from_param(given) for kind, given in zip(function.argtypes, arguments, strict=True)]
            assert len(converted) == len(arguments)
            self.calls.append((name, *[value_of(given) for given in arguments]))
            if self.statuses.get(name, 0) == 0 and hasattr(arguments[0], "_obj"):
                results = {"cuMemGetAllocationGranularity": PAGE, "cuMemAddressReserve": 1 << 40, "cuMemCreate": 77}
                arguments[0]._obj.value = results[name]
            return self.statuses.get(name, 0)

        return function


def value_of(given):
    if hasattr(given, "_obj"):
        return bytes(given._obj) if isinstance(given._obj, ctypes.Structure) else "out"
    return getattr(given, "value", given)


def install(monkeypatch, **statuses):
    library = Library(**statuses)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return library


def words(*numbers):
    return b"".join(number.to_bytes(4, "little") for number in numbers)


# Pinned memory, no handles for other processes, on device 3; then a pointer and eight bytes of flags.
PROPERTIES = words(1, 0, 1, 3) + bytes(16)


def test_the_functions_get_the_structures_of_the_driver(monkeypatch):
    library = install(monkeypatch)
    assert driver_memory.granularity(3) == PAGE
    assert driver_memory.reserve_address(2 * PAGE) == 1 << 40
    driver_memory.map_memory(1 << 40, 2 * PAGE, 3)
    driver_memory.unmap_memory(1 << 40, 2 * PAGE)
    driver_memory.free_address(1 << 40, 2 * PAGE)
    assert library.calls == [
        ("cuMemGetAllocationGranularity", "out", PROPERTIES, 0),
        ("cuMemAddressReserve", "out", 2 * PAGE, 0, 0, 0),
        ("cuMemCreate", "out", 2 * PAGE, PROPERTIES, 0),
        ("cuMemMap", 1 << 40, 2 * PAGE, 0, 77, 0),
        ("cuMemRelease", 77),
        ("cuMemSetAccess", 1 << 40, 2 * PAGE, words(1, 3, 3), 1),
        ("cuMemUnmap", 1 << 40, 2 * PAGE),
        ("cuMemAddressFree", 1 << 40, 2 * PAGE),
    ]


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemCreate", []),
        ("cuMemMap", ["cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap"]),
    ],
)
def test_a_mapping_that_fails_is_undone(monkeypatch, failing, undone):
    library = install(monkeypatch, **{failing: 1})
    with pytest.raises(DeviceError, match=f"{failing} failed with status 1"):
        driver_memory.map_memory(1 << 40, PAGE, 0)
    names = [call[0] for call in library.calls]
    assert names[names.index(failing) + 1 :] == undone


def test_a_full_device_and_an_old_driver_are_distinct_errors(monkeypatch):
    install(monkeypatch, cuMemCreate=2)
    with pytest.raises(NotEnoughMemory, match="free some and call again"):
        driver_memory.map_memory(1 << 40, PAGE, 0)
    install(monkeypatch, cuMemAddressReserve="missing")
    with pytest.raises(DeviceError, match="the CUDA driver lacks cuMemAddressReserve"):
        driver_memory.reserve_address(PAGE)
