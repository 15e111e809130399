"""The alert sinks, each a file with its settings. A module is loaded when a sink of its kind is configured.

Belongs here: one file with a class that extends `base.AlertSink` and its configuration, and a row in `table`.

Does not belong here: what is sent and when (`alerts`), and connections (`clients`).
"""
