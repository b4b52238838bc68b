"""`skuda train-check`: train a small model with int8 layers, and compare it with bf16."""
