"""Health, metrics, state and the controls over HTTP.

`interface` says what is shown and commanded, `app` answers requests, `server` owns the sockets. The daemon imports
`components`, which brings in the other two (and with them starlette and hypercorn) when the web part starts.
"""
