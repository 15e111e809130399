"""One value on every process or thread of BE containers: ``oom_score_adj``, and the scheduling policy.

``process_values`` has what all of them share: listing, the rows, writing, undoing and the periodic sweep. A module each
says what the value is.

Does not belong here: which containers get which value (`policies`).
"""
