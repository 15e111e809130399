"""Traffic classes of network devices, in the host's and in pods' network namespaces.

Belongs here: qdiscs, classes and filters, their netlink messages, and restoring them.

Does not belong here: how much bandwidth a pod should have (`policies`).
"""
