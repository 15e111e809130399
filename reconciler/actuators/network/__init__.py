"""Traffic classes of network devices, in the host's and in pods' network namespaces."""
