"""Control files of cgroups.

Belongs here: setting one file, and restoring it. ``apply`` is the whole operation: compare and decide (``decide``, by
the rules of ``compare`` and the readings of ``control_files``; foreign values by ``conflict`` and ``foreign_rules``;
groups that a container made below its own by ``inner_groups``), record the originals, order, write, verify, record the
outcome (``status``), and prepare the writes for the runtime's next signal (``fastpath``). ``restore`` undoes it, with
or without a daemon, from the ledger and from the runtime's and kubelet's ``records``.

Does not belong here: which settings are wanted (`policies`), when they are applied (`control`), the format and the
order of writes (`cgroupfs`).
"""
