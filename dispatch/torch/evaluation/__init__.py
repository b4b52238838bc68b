"""How far a model is from another one: of its tokens, and of each of its layers."""
