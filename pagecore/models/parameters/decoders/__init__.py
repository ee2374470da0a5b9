"""Parameters of text models, and of the layers that only some families have."""
