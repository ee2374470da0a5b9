"""Values that are invalid for every argument, including objects that call back during a call."""

import inspect
import math

import numpy as np

from pagecore import AttentionSpec, PagedKVCache


class Caller:
    """An integer, a float, a list and an array at once; each access calls back."""

    def __init__(self, value, call):
        self._value, self._call = value, call

    def __repr__(self):
        return f"Caller({self._value!r})"

    def __index__(self):
        self._call()
        return self._value

    __int__ = __index__

    def __float__(self):
        self._call()
        return float(self._value)

    def __len__(self):
        self._call()
        return 1

    def __iter__(self):
        self._call()
        return iter([self._value])

    def __getitem__(self, place):
        self._call()
        if place:
            raise IndexError(place)
        return self._value

    def __eq__(self, other):
        self._call()
        return self is other

    def __hash__(self):
        self._call()
        return 7

    def __array__(self, *_, **__):
        self._call()
        return np.array([self._value])


class HashCaller:
    """A hashable object that calls back when it is hashed or compared."""

    def __init__(self, call):
        self._call = call

    def __repr__(self):
        return "HashCaller()"

    def __hash__(self):
        self._call()
        return 7

    def __eq__(self, other):
        self._call()
        return self is other


class TextCaller(str):
    """A str that calls back when it is hashed or compared."""

    def __new__(cls, text, call):
        made = super().__new__(cls, text)
        made._call = call
        return made

    def __hash__(self):
        self._call()
        return super().__hash__()

    def __eq__(self, other):
        self._call()
        return super().__eq__(other)


class FloatCaller(float):
    """A number that calls back when it is converted or compared."""

    def __new__(cls, value, call):
        made = super().__new__(cls, value)
        made._call = call
        return made

    def __float__(self):
        self._call()
        return float.__add__(self, 0.0)

    def __lt__(self, other):
        self._call()
        return super().__lt__(other)

    def __le__(self, other):
        self._call()
        return super().__le__(other)

    __hash__ = float.__hash__


class ListCaller(list):
    """A list subclass that calls back when it is iterated."""

    def __init__(self, values, call):
        super().__init__(values)
        self._call = call

    def __iter__(self):
        self._call()
        return super().__iter__()

    def __len__(self):
        self._call()
        return super().__len__()


PLAIN = (
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: -1,
    lambda: 1,
    lambda: 2**31 - 1,
    lambda: 2**31,
    lambda: -(2**31) - 1,
    lambda: 2**63,
    lambda: -(2**70),
    lambda: 10**400,
    lambda: 1.5,
    lambda: 2.0,
    lambda: math.nan,
    lambda: math.inf,
    lambda: 1e300,
    lambda: 1j,
    lambda: "",
    lambda: "1",
    lambda: "cpu",
    lambda: "\ud800",
    lambda: b"12",
    lambda: np.int8(3),
    lambda: np.int64(2),
    lambda: np.uint64(2**64 - 1),
    lambda: np.float32(2),
    lambda: np.bool_(True),
    lambda: np.datetime64(3, "s"),
    lambda: np.array(2),
    lambda: np.array([1.5]),
    lambda: np.array(["1"]),
    lambda: np.array([1, None], object),
    lambda: np.array([2**40]),
    lambda: np.zeros((2, 2), np.int32),
    lambda: np.zeros(0, np.int64),
    lambda: np.arange(6, dtype=np.int32)[::-2],
    lambda: np.zeros((3, 2, 8), np.float32),
    lambda: np.zeros((0, 2, 8), np.float32),
    lambda: np.zeros((3, 2, 8), np.complex64),
    lambda: np.zeros((1, 2, 1, 8), np.float32),
    list,
    tuple,
    dict,
    set,
    lambda: [1],
    lambda: [1, 2, 3],
    lambda: [[1, 2], [3]],
    lambda: [[1], 2],
    lambda: [1, "2"],
    lambda: [1, 2.5],
    lambda: [None],
    lambda: [2**63],
    lambda: [-1, 2**31],
    lambda: {"a": 1},
    lambda: {1, 2},
    lambda: range(3),
    lambda: (i for i in (1, 2)),
    lambda: iter([]),
    object,
    lambda: len,
    lambda: int,
    lambda: Ellipsis,
    lambda: memoryview(b"123"),
    lambda: [(0, 2, b"x")],
    lambda: [(0, 2, "x")],
    lambda: [(0, 2)],
    lambda: [(2, 0, 1)],
    lambda: [(0, 2**70, 1)],
    lambda: AttentionSpec(2, 8),
    lambda: [AttentionSpec(2, 8), 3],
)


CALLERS = (Caller, HashCaller, ListCaller, TextCaller, FloatCaller)


def calls_back(value):
    """Return True if a value, or a part of it, may call back."""
    parts = value if isinstance(value, list | tuple) else ()
    return inspect.isgenerator(value) or any(isinstance(part, CALLERS) for part in [value, *parts])


def foreign_value(good, random, callback):
    """Return a new value to pass instead of a valid one."""
    if random.integers(3) == 0:
        return disguised(good, random, callback)
    choice = random.integers(len(PLAIN) + 14)
    if choice < len(PLAIN):
        return PLAIN[choice]()
    choice -= len(PLAIN)
    if choice < 5:
        return Caller(int(random.integers(-1, 5)), callback)
    if choice < 7:
        return HashCaller(callback)
    if choice < 9:
        return ListCaller([1, 2], callback)
    if choice < 11:
        return [Caller(1, callback), 2]
    if choice < 13:
        return ("adapter", HashCaller(callback))
    return strangers()[random.integers(4)]


def disguised(value, random, callback):
    """Return a valid value in a form that calls back when it is accessed."""
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple | str):
        return HashCaller(callback)
    if isinstance(value, int):
        return Caller(value, callback)
    if isinstance(value, str):
        return TextCaller(value, callback)
    if isinstance(value, float):
        return FloatCaller(value, callback)
    form = random.integers(4)
    if form == 0:
        return ListCaller(value, callback)
    if form == 1:
        return (called(one, callback) for one in value)
    if form == 2 and value and all(type(one) is int for one in value):
        return [Caller(one, callback) for one in value]
    return type(value)([*value[:-1], Caller(1, callback)])


def called(value, callback):
    callback()
    return value


def strangers(made=[]):  # noqa: B006
    """Return a sequence and a batch of another cache, that cache, and a removed sequence."""
    if not made:
        cache = PagedKVCache(AttentionSpec(2, 8, dtype="float32"), num_blocks=9)
        gone = cache.add_sequence([1, 2])
        cache.remove(gone)
        other = cache.add_sequence([1, 2, 3])
        made += [other, cache.make_batch(), cache, gone]
    return made
