"""What is wanted: one file per policy, and one table (`table.py`) that names them all."""
