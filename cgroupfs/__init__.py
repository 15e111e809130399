"""The kernel's cgroup files: where they are, what they mean, how to write them safely. Knows no pods and no policy."""
