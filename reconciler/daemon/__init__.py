"""The daemon's program: main, the agent that wires the parts, its status."""
