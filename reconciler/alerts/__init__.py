"""Alerts to people: the alerts, a queue that survives a crash, and the sinks.

Belongs here: the alert, its incident, the outbox, and the delivery to each sink.

Does not belong here: when there is something to report: the parts themselves decide that (`control`, `interference`,
`responses`).
"""
