"""Cache specs of published models, read from their config.json."""

from pagecore.models.config_files.fields import ConfigError
from pagecore.models.kv_scales import KVScales, read_kv_scales
from pagecore.models.model_config import ModelConfig
from pagecore.models.specs import read_model_config, specs_from_config

__all__ = ["ConfigError", "KVScales", "ModelConfig", "read_kv_scales", "read_model_config", "specs_from_config"]
