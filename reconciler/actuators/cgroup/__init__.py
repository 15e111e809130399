"""Control files of cgroups.

Belongs here: setting one file in seven modules, and its undoing in two. ``apply`` has the act from top to bottom:
compare and decide (``decide``, by the rules of ``compare`` and the readings of ``control_files``; other programs'
values by ``conflict``), record the originals, order, write, verify, record the outcome (``status``), and leave the
writes ready for the runtime's next signal (``fastpath``). Undoing it, with or without a daemon, is ``restore`` and the
runtime's and kubelet's ``records``.

Does not belong here: what is wanted (`policies`), when (`control`), the format and the order of writes (`cgroupfs`).
"""
