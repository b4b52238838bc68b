"""Checkpoints, and the packages transformers and peft."""
