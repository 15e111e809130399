"""The configuration language: YAML reader, schema, binder, units, quantities.

What the settings mean is in `config`; nothing in here knows pods.
"""
