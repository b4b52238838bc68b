"""torch as a backend of skuda. Nothing here imports torch before a kernel is run."""
