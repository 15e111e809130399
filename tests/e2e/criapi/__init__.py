"""Generated CRI messages that play a kubelet (tests only); the agent's own, smaller set lives in reconciler."""
