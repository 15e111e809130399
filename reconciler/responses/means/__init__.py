"""Ways to end a pod, one file each, and the word to it before. `table` has them all."""
