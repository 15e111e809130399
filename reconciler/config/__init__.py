"""The configuration's model, loading and documentation, and the environment that the agent runs in."""
