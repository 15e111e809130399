"""The configuration language: YAML reader, schema, binder, units, quantities.

Belongs here: how text becomes checked values, with file, line and column in each message.

Does not belong here: the meaning of the settings (`config`, and the sections next to their parts); nothing in here
depends on pods.

A ``ClassVar`` of a section is a constant, with its reason: no two nodes need it to differ.
"""
