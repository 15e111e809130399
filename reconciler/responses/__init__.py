"""What is done about a verdict: the ladder, eviction as its last step, and the ways to end a pod."""
