"""Eviction: when it is time, who goes, how many at most. Everything here is pure; carrying it out is not done here."""
