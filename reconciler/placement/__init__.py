"""Which CPUs and NUMA nodes a container gets: topology hints, pool sizes, the choice of CPUs.

Belongs here: pure functions over frozen values; an external plugin is the one exception.

Does not belong here: which pods have a claim, and to how much (`policies`), and writing CPU sets (`actuators`).
"""
