"""What `bench-model`, `certify` and `evaluate` measure."""
