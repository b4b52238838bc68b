"""What `bench-model` and `certify` measure."""
