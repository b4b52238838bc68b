"""``skuda bench-parallel``: a gated MLP on one GPU and on several, in int8 and in bf16."""
