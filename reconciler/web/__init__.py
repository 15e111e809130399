"""Health, metrics, state and the controls over HTTP.

Belongs here: ``interface`` with what is shown and commanded, ``answers``, ``app``, ``server``, ``connection`` and its
``limits``; the daemon imports ``components``, which loads the rest when the web part starts.

Does not belong here: what the documents hold (`daemon`, `telemetry`), and requests to other programs (`clients`).
"""
