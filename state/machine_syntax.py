"""The short form of docs/machine.md, for ``--help``: alone in a module because help must not import anything else."""

from typing import Final

SYNTAX: Final = """\
A machine is a shape, then any of the other parts, divided by semicolons:

  2 sockets x 2 nodes x 8 cores x 2 threads   each level is per one of the level before; levels may be omitted
  8 cores x 2 threads + 16 e-cores            additional efficiency cores with one thread
  l3 per 4 cores                              or: per core, per node (default), per socket
  e-cores 16-23                               the cores of these CPUs are efficiency cores
  offline 3    isolated 4-7                   CPUs that are not online; CPUs of isolcpus
  distance 10 12 32                           a node to itself, within its socket, to another socket;
                                              or a row for each node: distance 10 20 / 20 10
  memory 64G per node                         memory nodes 2 of 128G: nodes with memory only
  numbering adjacent                          siblings are n and n+1; alternating: CPU numbers alternate between nodes;
                                              firmware (default): first threads first
  numa off                                    one node over all sockets
"""
