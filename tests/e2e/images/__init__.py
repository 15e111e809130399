"""Container images made on the spot: no registry is used."""
