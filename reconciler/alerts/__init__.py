"""Messages to people: what is worth one, a queue that survives a crash, and the sinks.

Belongs here: the alert, its life as an incident, the outbox, and the delivery to each sink.

Does not belong here: when there is something to report: the parts themselves say that (`control`, `interference`,
`responses`).
"""
