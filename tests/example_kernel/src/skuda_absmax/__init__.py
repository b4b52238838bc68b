"""An op of its own for skuda; `row_absmax` is all of it."""
