"""What `bench-model`, `bench-parallel`, `train-check` and `demo --gpus` measure."""
