"""The doctor's checks: each compares one fact with what bypassd needs and returns ok, warn or bad, with the fix.

Belongs here: one module for each side of the node: machine, memory, devices, kubelet, agent.

Does not belong here: detecting the node (`config`), and printing the findings (`cli`).
"""
