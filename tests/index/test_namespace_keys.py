"""Namespaces of a RadixTree: equal in value and type at every depth."""

import enum
import gc
import itertools
import uuid
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from pagecore.errors import UnsupportedDtype
from pagecore.index import RadixTree
from tests.together import together


class Tenant(NamedTuple):
    name: Any
    adapter: Any


class Other(NamedTuple):
    name: Any
    adapter: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = True + 1


class Level(enum.IntEnum):
    ONE = 1


@dataclass(frozen=True)
class User:
    id: Any
    note: Any = field(default=0, compare=False)


@dataclass(frozen=True)
class Guest(User):
    pass


class Key:
    """Custom object that is equal by content."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Key and self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Text(str):
    pass


class Meta(type):
    def __eq__(cls, other):
        return isinstance(other, Meta)

    def __hash__(cls):
        return 1


class First(metaclass=Meta):
    pass


class Second(metaclass=Meta):
    pass


ONES = [1, True, 1.0, 1 + 0j, np.int64(1), np.int32(1), Level.ONE, "1", b"1", 2**61, -1, 0, False, -(2**200), None]


def different():
    """Return values that a tree must distinguish; Python considers most of them equal to others."""
    yield from ONES[:-1]
    for make in (lambda one: (one,), lambda one: Tenant(one, "x"), lambda one: Other(one, "x"), User, Guest):
        yield from map(make, ONES)
    for one in ONES:
        yield frozenset({one})
        yield frozenset({one, "and"})
        yield (("nested", frozenset({(one,)})), User(Tenant(one, None)))
    yield from (
        "",
        b"",
        (),
        ((),),
        frozenset(),
        frozenset({frozenset()}),
        ("a", "b"),
        ("ab",),
        ("a", ("b",)),
        (("a",), "b"),
    )
    yield from (Colour.RED, Colour.BLUE, Key(1), Key(2), (Key(1), Key(2)), (Key(2), Key(1)), Text("1"), Text("a"))
    yield from (
        First,
        Second,
        int,
        bool,
        uuid.UUID(int=1),
        range(1),
        range(2),
        "\ud800",
        "s1:a",
        b"\x00",
        1.5,
        float("inf"),
    )


def test_namespaces_of_different_types_are_different_at_every_depth():
    tree = RadixTree(1)
    names = list(different())
    for i, name in enumerate(names):
        assert tree.match([5], namespace=name).num_tokens == 0, name
        tree.insert([5], [i + 1], namespace=name)
    assert [tree.match([5], namespace=name).blocks.tolist() for name in names] == [[i + 1] for i in range(len(names))]
    assert tree.num_namespaces == len(names)
    tree.check_invariants()
    tree.evict("full", len(names))
    assert (tree.num_namespaces, tree.num_nodes) == (0, 0)


def equal():
    """Return pairs that are equal in value and type."""
    yield 1000 + 0, int("1000")
    yield 0.0, -0.0
    yield "ab", "".join(["a", "b"])
    yield Tenant("a", 1), Tenant("a", 1)
    yield User(1, note=1), User(1, note=2)  # the note is not compared
    yield Key(1), Key(1)
    yield (Key("a"), User(Key(2))), (Key("a"), User(Key(2)))
    yield Colour.RED, Colour(1)
    yield np.float64(2.5), np.float64(2.5)
    yield uuid.UUID(int=5), uuid.UUID(int=5)
    for order in itertools.permutations([Key(1), Key(2), 1, "1", (1,)]):
        yield frozenset([Key(1), Key(2), 1, "1", (1,)]), frozenset(order)


def test_namespaces_of_equal_types_and_values_are_one():
    tree = RadixTree(1)
    for i, (one, other) in enumerate(equal()):
        tree.insert([i], [i + 1], namespace=one)
        assert tree.match([i], namespace=other).blocks.tolist() == [i + 1], other


def nested(depth, leaf="leaf"):
    return leaf if depth == 0 else (nested(depth - 1, leaf),)


class Deaf:
    def __hash__(self):
        raise RuntimeError("no")


class Mute:
    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise RuntimeError("no")


class Array:
    """Object whose comparison has no truth value, as for an array."""

    def __hash__(self):
        return 1

    def __ne__(self, other):
        return np.array([True, False])


@dataclass(frozen=True)
class Holder:
    value: Any


@together(
    "name",
    [
        [],
        ("a", {}),
        Tenant([], 1),
        float("nan"),
        (1, float("nan")),
        complex(0, float("nan")),
        Holder(float("nan")),
        np.float64("nan"),
        np.datetime64("NaT", "s"),
        Deaf(),
        Mute(),
        Array(),
        list[int],
        weakref.ref(Key),
        nested(17),
        bytearray(b"a"),
        np.array([1]),
    ],
)
def test_a_namespace_that_cannot_be_compared_is_refused(name):
    tree = RadixTree(1)
    for call in (tree.match, tree.match_and_lock):
        with pytest.raises(UnsupportedDtype, match="namespace"):
            call([1], namespace=name)
    with pytest.raises(UnsupportedDtype, match="namespace"):
        tree.insert([1], [1], namespace=name)
    assert (tree.num_namespaces, tree.num_nodes, tree.num_receipts) == (0, 0, 0)


@pytest.mark.parametrize("leaf", ["leaf", Colour.RED])
def test_sixteen_tuples_may_be_nested(leaf):
    tree = RadixTree(1)
    tree.insert([1], [1], namespace=nested(16, leaf))
    assert tree.match([1], namespace=nested(16, leaf)).num_tokens == 1


def test_an_object_is_kept_only_while_its_namespace_has_blocks_or_receipts():
    tree = RadixTree(1)
    key = Key("a")
    seen = weakref.ref(key)
    tree.insert([1], [1], namespace=("x", key))
    receipt = tree.match_and_lock([1], namespace=("x", Key("a")))
    del key
    assert tree.match([1], namespace=("x", Key("a"))).num_tokens == 1
    assert seen() is not None
    receipt.release()
    tree.evict("full", 1)
    del receipt
    gc.collect()
    assert seen() is None


def test_thousands_of_namespaces_with_equal_hashes_are_distinct():
    prime = 2**61 - 1  # hash(n + prime) == hash(n)
    tree = RadixTree(1)
    for i in range(3000):
        tree.insert([1], [i + 1], namespace=7 + i * prime)
    assert tree.num_namespaces == 3000
    assert tree.match([1], namespace=7 + 2999 * prime).blocks.tolist() == [3000]
