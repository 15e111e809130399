"""How the agent talks to others: HTTP, HTTP/2, gRPC, the Kubernetes API, kubeconfig, child processes.

What is asked, and what an answer means, belongs to `sources`, `alerts` and `responses`.
"""
