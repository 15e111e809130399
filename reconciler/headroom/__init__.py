"""What BE work may be promised: CPU and memory, smoothed over time.

Pure, but for the sampler and the report's file. Who runs where belongs to `placement`.
"""
