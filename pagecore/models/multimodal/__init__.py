"""The text model inside the config of a multimodal model."""
