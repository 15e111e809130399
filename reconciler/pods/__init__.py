"""What a pod is, says and asks for: class, selectors, annotations, resources, resize, metadata.

Belongs here: pure functions over `state`, and the metadata cache.

Does not belong here: reading files or asking programs for it (`sources`), and what the pod gets (`policies`).
"""
