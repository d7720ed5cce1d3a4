"""Measurements, each `python -m benchmarks.<name>`: a small table, and a last line `<name> ratio=...`."""
