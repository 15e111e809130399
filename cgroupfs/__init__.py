"""The kernel's cgroup files: their places, their meaning, writing them safely. Independent of pods and policies."""
