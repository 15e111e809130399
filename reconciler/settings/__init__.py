"""The configuration language: YAML reader, schema, binder, units, quantities.

Belongs here: how text becomes checked values, with file, line and column in each message.

Does not belong here: the meaning of the settings (`config`, and the sections beside their parts); nothing in here
depends on pods.
"""
