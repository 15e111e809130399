"""Control files of cgroups. What is wanted comes from the planner; nothing in here plans.

One file is set in seven modules. ``apply`` has the act from top to bottom: compare and decide (``decide``, by the rules
of ``compare`` and the readings of ``control_files``; other programs' values by ``conflict``), record the originals,
order, write, verify, record the outcome (``status``), and leave the writes ready for the runtime's next signal
(``fastpath``). Undoing it, with or without a daemon, is ``restore`` and the runtime's and kubelet's ``records``.
"""
