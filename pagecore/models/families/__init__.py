"""Families of text models: the fields that each reads, and the specs of its layers."""
