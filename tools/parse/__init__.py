"""Parse problems, shapes and devices from the command line."""
