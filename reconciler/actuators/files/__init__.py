"""Single files of the kernel that are no control files: `oom_score_adj`, `/proc/sys`."""
