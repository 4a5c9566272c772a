"""Trace, split, compile the unique pieces, stitch."""
