"""The structure of the program as facts: files that a way through it enters, the drawing of its rooms, its document."""
