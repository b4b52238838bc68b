"""Linear layers of codes, and gradients through them."""
