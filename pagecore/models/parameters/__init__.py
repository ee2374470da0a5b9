"""Parameters of published models, counted from their config.json, and the bytes of their weights."""

from pagecore.models.parameters.count import count_parameters, mtp_specs
from pagecore.models.parameters.counting.tally import Kind, Parameters
from pagecore.models.parameters.decoders.medusa import count_medusa, medusa_bytes
from pagecore.models.parameters.vision.tower import VisionTower, vision_tower
from pagecore.models.parameters.weights.quantization_config import WEIGHT_FORMATS, WeightFormat, weight_format

__all__ = [
    "WEIGHT_FORMATS",
    "Kind",
    "Parameters",
    "VisionTower",
    "WeightFormat",
    "count_medusa",
    "count_parameters",
    "medusa_bytes",
    "mtp_specs",
    "vision_tower",
    "weight_format",
]
