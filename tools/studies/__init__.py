"""What `bench-model`, `bench-parallel` and `certify` measure."""
