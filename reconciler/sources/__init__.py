"""Where knowledge of pods and of the node comes from: one module a source, each optional.

Belongs here: reading and parsing what kubelet, runtime, kernel and operator leave, and marking what has changed.

Does not belong here: joining it into one view (`control`), measured numbers (`signals`), and connections (`clients`).
"""
