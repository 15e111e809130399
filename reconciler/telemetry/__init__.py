"""Metrics and their Prometheus text."""
