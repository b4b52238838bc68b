"""Arrays on an NVIDIA GPU: intake, binding, calls, streams and the driver."""
