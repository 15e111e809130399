"""Connections to other programs: HTTP, HTTP/2, gRPC, the Kubernetes API, kubeconfig, child processes.

Belongs here: connections, limits, timeouts, credentials, and the forms of requests and responses.

Does not belong here: what is requested, and what a response means (`sources`, `alerts`, `responses`); nothing in here
depends on pods.
"""
