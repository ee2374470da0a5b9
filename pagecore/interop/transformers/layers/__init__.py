"""Layers of a model: their specs, their attention, and the interface that transformers expects of them."""
