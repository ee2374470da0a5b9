"""Parameters of published models, counted from their config.json, and the bytes of their weights."""

from pagecore.models.parameters.count import count_parameters, mtp_specs
from pagecore.models.parameters.formats import WEIGHT_FORMATS, WeightFormat, weight_format
from pagecore.models.parameters.tally import Kind, Parameters
from pagecore.models.parameters.vision import VisionTower, vision_tower

__all__ = [
    "WEIGHT_FORMATS",
    "Kind",
    "Parameters",
    "VisionTower",
    "WeightFormat",
    "count_parameters",
    "mtp_specs",
    "vision_tower",
    "weight_format",
]
