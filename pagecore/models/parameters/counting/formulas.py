"""Numbers of parameters as arithmetic expressions of a config's fields.

An encoder whose layers no other encoder has is described by one expression, such as
``"num_layers * (hidden_size * width + width)"``. A name is a field; ``part.name`` is a field of an object, and
``model.name`` one of the whole model. Flags are 0 or 1. ``len(name)`` is the length of a list, and
``count(name, 'kind')`` the number of its entries that equal a text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_matrices
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["Formula", "add_formulas"]

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class Formula:
    """An expression of fields.

    Parameters
    ----------
    text : str
        Sums, differences, products, rounded quotients and powers of integers and fields.
    """

    def __init__(self, text: str) -> None:
        self._root = ast.parse(" ".join(text.split()), mode="eval").body

    def evaluate(self, fields: Fields, model: Fields, names: Mapping[str, int]) -> int:
        """Return the value for a config.

        Parameters
        ----------
        fields, model : Fields
            Fields of the part that the formula describes, and of the whole model.
        names : mapping
            Values of names that are not fields: "text" for the features of the text model.

        Raises
        ------
        ConfigError
            A field is missing, or not an integer of at least 0, or not true or false.
        """
        return _value(self._root, fields, model, names)


def _value(node: ast.expr, fields: Fields, model: Fields, names: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return names[name] if name in names else _number(fields, name)
        case ast.Attribute(value=ast.Name(id="model"), attr=name):
            return _number(model, name)
        case ast.Attribute(value=ast.Name(id=part), attr=name):
            return _number(_part(model, part), name)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]):
            return len(_list(fields, name))
        case ast.Call(func=ast.Name(id="count"), args=[ast.Name(id=name), ast.Constant(value=kind)]):
            return sum(each == kind for each in _list(fields, name))
        case ast.BinOp(op=ast.FloorDiv(), right=right) if _value(right, fields, model, names) == 0:
            fields.refuse(f"{ast.unparse(right)} is 0; it must be 1 or more")
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, fields, model, names), _value(right, fields, model, names))
    raise AssertionError(f"a formula has {ast.unparse(node)}")


def _number(fields: Fields, name: str) -> int:
    return int(fields.flag(name)) if isinstance(fields.value(name), bool) else fields.integer(name, min=0)


def _part(model: Fields, name: str) -> Fields:
    part = model.inner(name)
    part.defaults = model.defaults
    return part


def _list(fields: Fields, name: str) -> list[object] | tuple[object, ...]:
    listed = fields.value(name)
    if not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.describe(name)}; it must be a list")
    return listed


def add_formulas(
    tally: Tally, matrices: str, rest: str, fields: Fields, model: Fields, names: Mapping[str, int] | None = None
) -> None:
    """Add the parameters of an encoder: `matrices`, which ranks share, and the `rest`, of which each rank has a copy.

    Arguments after `rest` are those of `Formula.evaluate`.
    """
    encoder_matrices(tally, Formula(matrices).evaluate(fields, model, names or {}))
    encoder_add(tally, Formula(rest).evaluate(fields, model, names or {}))
