"""Control files: compare, decide, order, write, verify, record, restore.

What is wanted comes from the planner; nothing in here plans.
"""
