"""Bits of the parameters of a format, and the bytes of weights in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pagecore.models.parameters.counting.tally import QUANTISED_KINDS, Kind, Matrix, Parameters
from pagecore.models.parameters.weights.excluded_modules import names_module
from pagecore.storage.checks import ceil_div

__all__ = ["DTYPE_BITS", "WEIGHT_FORMATS", "WeightFormat", "float8", "grouped"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits of a parameter.

    Attributes
    ----------
    name : str
    bits : Fraction
        Mean bits of an element of a layer's matrix, its share of the scales included; matrices whose sides are not
        multiples of `group` have more.
    other_bits : int
        Bits of a parameter that is not quantised: of embeddings without bits of their own, norms, biases, routers and
        vision towers.
    is_experts_only : bool
        Matrices outside of experts are not quantised.
    element_bits : int or Fraction
        Bits of an element alone; 0 if `bits` are exact, or if a group has a code and its elements have none.
    group : (int, int)
        Outputs and inputs that share a scale; 0 is all of them.
    scale_bits : int
        Bits of a scale, and of a zero point if there is one, or of the code of a group.
    matrix_bits, input_bits, output_bits : int or Fraction
        Bits of each matrix, such as a global scale or a codebook, of each of its inputs, such as the order of GPTQ's
        columns, and of each of its outputs.
    head_bits : int or Fraction
        Mean bits of an element of an output head that is not the embedding; 0 for those of other parameters.
    embedding_bits : int or Fraction
        Mean bits of an element of an embedding; 0 for those of other parameters. An embedding that is the output head
        has `head_bits`.
    unquantised : tuple of str
        Patterns of the modules that the checkpoint does not quantise: names, globs, and regular expressions after
        "re:".
    experts : WeightFormat, optional
        Format of the matrices of routed experts, if they have another one.
    modules : tuple of (str, WeightFormat)
        Patterns of modules with a format of their own, which is the one of the first pattern that names the module.
    is_modules_only : bool
        Matrices that no pattern of `modules` names are not quantised.
    is_read : bool
        True if the format is that of a `quantization_config`, not a name that the caller gave.
    """

    name: str
    bits: Fraction
    other_bits: int = 16
    is_experts_only: bool = False
    element_bits: int | Fraction = 0
    group: tuple[int, int] = (0, 0)
    scale_bits: int = 0
    matrix_bits: int = 0
    input_bits: int = 0
    output_bits: int | Fraction = 0
    head_bits: int | Fraction = 0
    embedding_bits: int | Fraction = 0
    unquantised: tuple[str, ...] = ()
    experts: WeightFormat | None = None
    modules: tuple[tuple[str, WeightFormat], ...] = ()
    is_modules_only: bool = False
    is_read: bool = False

    @property
    def is_quantised(self) -> bool:
        """True if matrices have scales; a checkpoint may leave some of its matrices unquantised."""
        return self.name not in DTYPE_BITS

    def nbytes(self, parameters: Parameters, ranks: int = 1, data_parallel: int = 1) -> int:
        """Return the bytes of the weights on one rank, scales included."""
        total = Fraction(0)
        for kind, count in parameters.on_rank(ranks, data_parallel).items():
            if kind not in QUANTISED_KINDS or not self.is_quantised:
                total += count * self.other_bits
        if self.is_quantised:
            if self.head_bits:
                total -= Fraction(parameters.head * (self.other_bits - self.head_bits), ranks)
            if self.embedding_bits:
                tables = parameters.of_kind(Kind.EMBEDDING) - parameters.head
                bits = self.embedding_bits if parameters.head else self.head_bits
                total -= Fraction(tables * (self.other_bits - bits), ranks)
            shares = parameters.shares(ranks, data_parallel)
            for matrix, copies in parameters.matrices.items():
                total += Fraction(copies * self._matrix(matrix), shares[matrix.split])
        return math.ceil(total / 8)

    def count_unquantised(self, parameters: Parameters) -> int:
        """Return the parameters of layers' matrices that the checkpoint leaves unquantised."""
        matrices = parameters.matrices.items()
        return sum(m.inputs * m.outputs * n for m, n in matrices if not self._stores(m, self._of_module(m)))

    def _stores(self, matrix: Matrix, own: WeightFormat | None) -> bool:
        """Return True if a matrix, whose module may have a format of its own, is quantised."""
        if self.is_experts_only and matrix.kind is not Kind.EXPERT:
            return False
        if self.is_modules_only and own is None:
            return False
        return not any(names_module(pattern, matrix.name) for pattern in self.unquantised)

    def _of_module(self, matrix: Matrix) -> WeightFormat | None:
        """Return the format of the module that a matrix belongs to; None if the module has no format of its own."""
        return next((each for pattern, each in self.modules if names_module(pattern, matrix.name)), None)

    def _matrix(self, matrix: Matrix) -> int | Fraction:
        """Return the bits of a matrix."""
        elements = matrix.inputs * matrix.outputs
        own = self._of_module(matrix)
        if not self._stores(matrix, own):
            return elements * self.other_bits
        if own is None and matrix.kind is Kind.EXPERT:
            own = self.experts
        if own is not None:
            return own._matrix(matrix)
        if not self.element_bits and not self.scale_bits:
            return elements * self.bits
        outputs, inputs = self.group
        groups = ceil_div(matrix.outputs, outputs or matrix.outputs) * ceil_div(matrix.inputs, inputs or matrix.inputs)
        codes = elements * self.element_bits + groups * self.scale_bits
        return codes + self.matrix_bits + matrix.inputs * self.input_bits + matrix.outputs * self.output_bits


def float8(block: object, scale_bits: int, is_by_row: bool = False) -> WeightFormat:
    """Return float8 with a scale of each block, of each output, or of each matrix."""
    sides: Any = block
    if isinstance(sides, list | tuple) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        bits = Fraction(8) + Fraction(scale_bits, sides[0] * sides[1])
        return WeightFormat("fp8", bits, element_bits=8, group=(sides[0], sides[1]), scale_bits=scale_bits)
    return WeightFormat("fp8", Fraction(8), element_bits=8, group=(int(is_by_row), 0), scale_bits=scale_bits)


def grouped(name: str, bits: int | Fraction, size: int, scale_bits: int, matrix_bits: int = 0) -> WeightFormat:
    """Return a format whose scales are those of `size` inputs of an output; 0 for all inputs."""
    mean = Fraction(bits) + (Fraction(scale_bits, size) if size else 0)
    return WeightFormat(name, mean, element_bits=bits, group=(1, size), scale_bits=scale_bits, matrix_bits=matrix_bits)


def _gguf(name: str, bits: int, size: int, scale_bits: int) -> WeightFormat:
    """Return the format of a GGUF file of one type, whose output head is of type q6_k unless others have more bits."""
    found = grouped(name, bits, size, scale_bits)
    return replace(found, embedding_bits=found.bits, head_bits=max(found.bits, 6 + Fraction(144, 256)))


DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
# Types of tensors in GGUF files: bits of a number, numbers that share scales, and bits of the scales.
_GGUF: Mapping[str, tuple[int, int, int]] = {
    "q4_0": (4, 32, 16),
    "q4_1": (4, 32, 32),
    "q5_0": (5, 32, 16),
    "q5_1": (5, 32, 32),
    "q8_0": (8, 32, 16),
    "iq4_nl": (4, 32, 16),
    "iq4_xs": (4, 256, 64),
    "q2_k": (2, 256, 160),
    "q3_k": (3, 256, 112),
    "q4_k": (4, 256, 128),
    "q5_k": (5, 256, 128),
    "q6_k": (6, 256, 144),
}
# Group sizes are those that checkpoints use: int4 128 with a scale and a zero point, nvfp4 16, mxfp4 32.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    **{name: WeightFormat(name, Fraction(bits), bits) for name, bits in DTYPE_BITS.items()},
    "fp8": WeightFormat("fp8", Fraction(8)),
    "int8": WeightFormat("int8", Fraction(8)),
    "int4": WeightFormat("int4", 4 + Fraction(20, 128)),
    "nvfp4": WeightFormat("nvfp4", 4 + Fraction(8, 16)),
    "mxfp4": WeightFormat("mxfp4", 4 + Fraction(8, 32)),
    **{name: _gguf(name, *layout) for name, layout in _GGUF.items()},
}
