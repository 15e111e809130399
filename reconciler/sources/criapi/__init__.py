"""Messages of the container runtime interface, generated from cri.proto. The only untyped package."""
