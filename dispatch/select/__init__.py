"""Selection: matching, measured times, explanations."""
