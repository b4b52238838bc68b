"""What `bench-model`, `bench-parallel`, `train-check` and `certify` measure."""
