"""CUTLASS as a rival of `skuda bench`."""
