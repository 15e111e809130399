"""A reader of labels and annotations under the default configuration."""

from reconciler.pods.marks import MarkReader, ReadKeys

MARKS = MarkReader(ReadKeys())
