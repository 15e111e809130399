"""Facts about a pod: class, selectors, annotations, resources, resize, metadata.

Belongs here: pure functions over `state`, and the metadata cache.

Does not belong here: reading files or calling programs for it (`sources`), and what the pod gets (`policies`).
"""
