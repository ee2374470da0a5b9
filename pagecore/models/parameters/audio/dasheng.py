"""The encoder of MiDashengLM, a transformer over patches of a spectrogram, and its projector.

Source: the configuration and model of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.counting.encoder_parts import encoder_add, encoder_linear
from pagecore.models.parameters.counting.tally import Tally

__all__ = ["add_dasheng"]

_SIZES: Mapping[str, object] = {
    "depth": 12,
    "embed_dim": 768,
    "init_values": None,
    "input_channels": 1,
    "mlp_ratio": 4.0,
    "n_mels": 64,
    "patch_size": 16,
    "patch_stride": 16,
    "qkv_bias": True,
    "target_length": 1012,
}


def add_dasheng(tally: Tally, whole: Fields, fields: Fields, text: int) -> None:
    """Add the encoder, and the projector that reads several of its frames."""
    fields.defaults = _SIZES
    hidden, layers, bins = map(fields.integer, ("embed_dim", "depth", "n_mels"))
    width = fields.scaled(hidden, "mlp_ratio")
    patch, stride = _sides(fields, "patch_size"), _sides(fields, "patch_stride")
    encoder_add(tally, 2 * bins)  # the norm of the spectrogram
    encoder_linear(tally, fields.integer("input_channels") * patch[0] * patch[1], hidden, bias=True)
    encoder_add(tally, (bins // stride[0] + fields.integer("target_length") // stride[1]) * hidden)
    encoder_linear(tally, hidden, hidden, copies=4 * layers)
    encoder_add(tally, layers * (1 + 3 * fields.flag("qkv_bias")) * hidden)
    encoder_linear(tally, hidden, width, bias=True, copies=layers)
    encoder_linear(tally, width, hidden, bias=True, copies=layers)
    scales = 2 * bool(fields.value("init_values"))
    encoder_add(tally, (layers * (4 + scales) + 2) * hidden)
    whole.defaults = {**whole.defaults, "subsample_factor": 5}
    encoder_linear(tally, hidden * whole.integer("subsample_factor"), text, bias=True)
    encoder_linear(tally, text, text, bias=True)


def _sides(fields: Fields, name: str) -> tuple[int, int]:
    """Return a size along frequency and time: one number, or two."""
    if isinstance(fields.value(name), list | tuple):
        sides = fields.integers(name)
        if len(sides) != 2:
            fields.refuse(f"{fields.describe(name)}; it must be an integer, or two")
        return sides[0], sides[1]
    return (fields.integer(name),) * 2
