"""The triggers: each tells from the recent past whether the node lacks something that only an eviction gives back."""
