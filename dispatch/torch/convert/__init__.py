"""Turns layers of a model into layers of codes and back, and gets kernels ready."""
