"""Algorithms that choose one option per segment; `solve.py` is their door."""
