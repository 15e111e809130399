"""CPUs and NUMA nodes of containers: topology hints, pool sizes, the choice of CPUs.

Belongs here: pure functions over frozen values; an external plugin is the one exception.

Does not belong here: which pods get CPUs, and how many (`policies`), and writing CPU sets (`actuators`).
"""
