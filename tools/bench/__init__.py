"""Measuring: `skuda bench` and `skuda tune`."""
