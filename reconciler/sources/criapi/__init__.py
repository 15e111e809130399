"""Messages of the container runtime interface, generated from cri.proto. The only untyped package.

Belongs here: generated code; ``make protos`` writes it.

Does not belong here: handwritten code (`sources`).
"""
