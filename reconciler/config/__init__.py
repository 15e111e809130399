"""The configuration's model, loading and documentation, and the environment in which the agent runs.

Belongs here: the one model of all sections, the checks across sections, generated documents, and detecting the node's
paths.

Does not belong here: a section's own fields, which are next to the code that they configure, and the YAML language
(`settings`).
"""
