"""Health, metrics, state and the controls over HTTP.

Belongs here: ``interface`` with the data and the commands, ``answers``, ``app``, ``server``, ``connection`` and its
``limits``; the daemon imports ``components``, which loads the rest when the web part starts.

Does not belong here: the content of the documents (`daemon`, `telemetry`), and requests to other programs (`clients`).
"""
