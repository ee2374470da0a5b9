"""Cache specs of published models, read from their config.json."""

from pagecore.models.config import ModelConfig, read_model_config, specs_from_config
from pagecore.models.fields import ConfigError

__all__ = ["ConfigError", "ModelConfig", "read_model_config", "specs_from_config"]
