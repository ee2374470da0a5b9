"""Reading of config.json and params.json files."""
