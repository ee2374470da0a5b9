"""Budget of a device's memory: weights, cache and reserves, and advice where they do not fit."""

from pagecore.serving.budget.options import DeviceOptions
from pagecore.serving.budget.presets import Preset, preset_for, reserved_bytes, static_fraction, vision_factor
from pagecore.serving.memory_classes import DevicePlan, MemoryClass

__all__ = [
    "DeviceOptions",
    "DevicePlan",
    "MemoryClass",
    "Preset",
    "preset_for",
    "reserved_bytes",
    "static_fraction",
    "vision_factor",
]
