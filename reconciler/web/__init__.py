"""Health, metrics, state and the controls over HTTP.

`interface` says what is shown and commanded, `answers` builds state and metrics, `app` answers requests, `server` owns
the sockets, `connection` one connection each, within the `limits`. The daemon imports `components`, which brings in app
and server (and with them starlette and h11) when the web part starts.
"""
