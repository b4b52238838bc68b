"""`demo --gpus`: hashes of a transformer stack over numbers of ranks, batches and devices."""
