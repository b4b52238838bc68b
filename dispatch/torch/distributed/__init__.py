"""Layers on the ranks of a group."""
