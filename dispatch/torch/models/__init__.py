"""What a model is made of: its layers, and the source of its modules."""
