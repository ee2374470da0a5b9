"""Parameters of the layers of Qwen4 with hashed n-grams.

Source: the modeling file of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.tally import Split, Tally
from pagecore.storage.checks import ceil_div

__all__ = ["NGRAM_DEFAULTS", "add_hashed_ngrams"]

NGRAM_DEFAULTS = {
    "ple_embed_dim": None,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
}
# Bases with which the test of Miller and Rabin is exact below 2^64.
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def add_hashed_ngrams(tally: Tally, fields: Fields, layer: int) -> None:
    """Add the table of a layer in `ple_layer_ids`, its projections, norms and convolution; nothing for other layers."""
    listed = sorted(set(fields.value("ple_layer_ids") or ()))
    if layer + 1 not in listed:
        return
    hidden, streams = fields.integer("hidden_size"), fields.integer("hc_count")
    width = hidden if fields.value("ple_embed_dim") is None else fields.integer("ple_embed_dim")
    heads = (fields.integer("ngram_size", min=2) - 1) * fields.integer("heads_per_ngram")
    if width % heads:
        name = fields.name("ple_embed_dim")
        fields.refuse(f"{name} is {width}; it must be a multiple of the {heads} heads of n-grams")
    multiple = fields.integer("make_ngram_vocab_size_divisible_by")
    first = listed.index(layer + 1) * heads
    primes = _primes(fields.integer("ngram_vocab_size_base"), first + heads)[first:]
    tally.module = f"model.layers.{layer}.ple"
    rows = ceil_div(sum(primes), multiple) * multiple
    tally.linear(width // heads, rows, name="ple_embedding.ngram_embedding")
    tally.linear(width, streams * hidden, split=Split.COPY, name="key_proj")
    tally.linear(width, hidden, split=Split.COPY, name="value_proj")
    tally.norm(streams * hidden, copies=3)
    tally.add(streams * hidden * fields.integer("ple_conv_kernel_size"))


def _primes(start: int, count: int) -> list[int]:
    """Return the first primes that are not below `start`."""
    found: list[int] = []
    number = start
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return found


def _is_prime(number: int) -> bool:
    if number < 2 or any(number % base == 0 for base in _BASES):
        return number in _BASES
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for base in _BASES:
        squares = [pow(base, odd << times, number) for times in range(twos)]
        if squares[0] != 1 and number - 1 not in squares:
            return False
    return True
