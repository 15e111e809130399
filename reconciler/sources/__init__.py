"""Sources of facts about pods and the node: one module a source, each optional.

Belongs here: reading and parsing files and APIs of kubelet, runtime, kernel and operator, and marking what has changed.

Does not belong here: joining it into one view (`control`), measured numbers (`signals`), and connections (`clients`).
"""
