"""The bare C loop beside which the agent's "signal to last write" is measured."""
