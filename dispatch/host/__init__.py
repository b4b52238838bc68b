"""Checks and binds arrays on the CPU."""
