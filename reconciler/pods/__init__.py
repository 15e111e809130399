"""What a pod is, says and asks for: class, selectors, annotations, resources, resize, metadata.

Pure functions over `state.model`, but for the metadata cache. No file is read in here.
"""
