"""Arrays on the CPU: intake, rules and binding."""
