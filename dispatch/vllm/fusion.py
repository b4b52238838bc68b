"""Norms and gated activations write the codes of the layers behind them, in the graph that vLLM compiles."""

from __future__ import annotations


def add_pass() -> None:
    """Add the pass to the present config."""
