"""The doctor's checks: each compares one thing with what bypassd needs and says ok, warn or bad, with the fix.

Belongs here: one module for each side of the node: machine, memory, devices, kubelet, agent.

Does not belong here: finding the node out (`config`), and drawing the findings (`cli`).
"""
