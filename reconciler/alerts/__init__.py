"""Telling people: what is worth telling, a queue that survives a crash, and the sinks."""
