"""The `skuda` command, and what stands beside the dispatcher: SmoothQuant's offline half."""
