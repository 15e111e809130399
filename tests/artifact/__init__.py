"""The built artifacts: they run where nothing of the host can be used, and leave nothing behind."""
