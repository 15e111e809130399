"""The alert sinks, a file each. `table` has them all; a file is loaded when a sink is configured."""
